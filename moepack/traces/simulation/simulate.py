"""Simulation: traces run through caches of every policy, at any budgets."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

import numpy as np

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ModelShape
from moepack.common.sizes import Size, as_list, parse_layers, parse_size, size_text
from moepack.traces.caching import cache as caching
from moepack.traces.formats.reading import AnyTrace, TracedModel, TraceFiles, opened
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.simulation.caches import BELADY, STATIC, Caches
from moepack.traces.simulation.curves import LruCurves
from moepack.traces.simulation.facts import LEAST_SELECTIONS, CurvePoint, Simulation, needed_tokens
from moepack.traces.simulation.lookups import Lookups, LookupStream
from moepack.traces.spool import Spool, SpooledTrace

POLICIES = (BELADY, *caching.POLICIES, STATIC)
"""Policies that can be simulated; those of `caching` can be run as well."""

_BUDGET_COUNT = 12
_CURVE_COUNT = 64
_LEAST_LOSS = 0.01


def simulate(
    paths: AnyTrace,
    *,
    model: TracedModel | None = None,
    budgets: Size | Sequence[Size] = (),
    policies: str | Sequence[str] | None = None,
    batch_count: int | None = None,
    layers: str | Collection[int] | None = None,
    options: ReadOptions = ReadOptions(),
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """Simulate caches of experts on traces.

    `paths` are files, or what `read_trace` returned. `budgets` are bytes, texts such as `2GiB`, or
    `25%` of all experts, one or several; by default a dozen from the experts of one token to the
    whole model. `policies` are some of POLICIES, by default all. Prompts are computed in batches of
    `batch_count` tokens, by default at once. With `layers` (numbers, or `0-3,7`) all others are
    left out. The bytes of experts are those of `model` (a source, a pack, open or not, or a shape),
    or of the shape in `options`. `progress` is called with 1 after each cache, and the number
    of all caches.

    Raises TraceError for faults in a file, and for counts without tokens; RequestError for invalid
    options, for budgets below the experts of one token in a layer, and if no bytes are known.
    """
    trace = opened(paths, options, model)
    policies = list(dict.fromkeys(POLICIES if policies is None else as_list(policies)))
    _check_options(policies, batch_count)
    layers = None if layers is None else parse_layers(layers, "layers")
    shape = _run_shape(trace.shape, layers)
    routed, total = shape.routed, shape.routed_length
    requested = [parse_size(one, "budgets", whole=total) for one in as_list(budgets)]
    with ExitStack() as stack:
        caches, warnings = _read(trace, shape, batch_count, stack)
        stream, curves = caches.stream, caches.curves
        # The bytes that a decoded token used in each layer; none if none was decoded.
        used = [family.expert_length * stream.used(layer) for layer, family in routed.items()]
        lengths = _budgets(requested, used, total)
        results = []
        for policy in policies:
            for one in caches.evaluate(policy, lengths):
                results.append(one)
                if progress is not None:
                    progress(1, len(lengths) * len(policies))
    whole = curves.whole
    per_expert = (whole.decode.count or whole.prefill.count) / 2 / shape.routed_count
    enough = whole.decode.least_budget(1 - _LEAST_LOSS)
    return Simulation(
        token_count=stream.steps.token_count,
        decode_token_count=stream.decode_token_count,
        request_count=stream.steps.request_count,
        batch_count=batch_count,
        expert_length=total,
        step_length=sum(used) or None,
        enough_length=None if enough is None else max(enough, max(used)),
        cold_share=whole.decode.cold_count / whole.decode.count if whole.decode.count else None,
        lookups_per_expert=per_expert,
        is_long_enough=per_expert >= LEAST_SELECTIONS,
        needed_token_count=needed_tokens(
            stream.decode_token_count or stream.steps.token_count, per_expert
        ),
        results=tuple(results),
        curve=_curve(curves, lengths, sum(used) or max(used), total),
        unknown=tuple(sorted(stream.unknown)),
        warnings=warnings + stream.left_out,
    )


def _check_options(policies: Sequence[str], batch_count: int | None) -> None:
    for policy in policies:
        caching.check_policy(policy, POLICIES)
    if batch_count is not None and batch_count < 1:
        expected = "1 or more"
        raise RequestError(
            "not a count", argument="batch_count", expected=expected, found=batch_count
        )


def _read(
    trace: TraceFiles | SpooledTrace,
    shape: ModelShape,
    batch_count: int | None,
    stack: ExitStack,
) -> tuple[Caches, Counter[str]]:
    """Read traces, once; return the caches of their lookups, and warnings.

    `stack` closes the spool. Raises TraceError for no tokens.
    """
    curves, spool = LruCurves(shape.routed), stack.enter_context(Spool())

    def add(lookups: Lookups) -> None:
        curves.add(lookups)
        spool.add(lookups)

    stream = LookupStream(add, shape.routed, batch_count)
    # Experts have places in their order, whatever comes first in a trace.
    for layer, family in shape.routed.items():
        experts = np.arange(family.expert_count).astype(np.uint16)
        stream.places.index_of(np.full_like(experts, layer), experts)
    warnings = trace.feed(stream.add)
    stream.end()
    if not stream.steps.token_count:
        hint = "only counts are known, a cache needs tokens in their order: moepack trace record"
        raise TraceError("no tokens in it", path=trace.paths[0], hint=hint)
    return Caches(shape, stream, curves, spool), warnings


def _run_shape(shape: ModelShape | None, layers: Collection[int] | None) -> ModelShape:
    """Return the shape of the layers that llama.cpp runs. Raises RequestError without any."""
    if shape is None:
        problem = "the bytes of an expert are not known"
        hint = "`model` names the source or the pack that was traced"
        raise RequestError(problem, hint=hint)
    run = (shape if layers is None else shape.of_layers(layers)).without_mtp()
    if not run.routed:
        raise RequestError("the model has no layer with routed experts")
    return run


def _budgets(requested: Sequence[int], used: Sequence[int], total: int) -> list[int]:
    least = max(used)
    if not requested:
        start = min(sum(used), total) or total
        return sorted({int(length) for length in np.geomspace(start, total, _BUDGET_COUNT)})
    if min(requested) < least:
        raise RequestError(
            "the budget is less than one token's experts in a layer",
            argument="budgets",
            expected=f"at least {size_text(least)}",
            found=size_text(min(requested)),
        )
    return sorted(set(requested))


def _curve(
    curves: LruCurves, budgets: Sequence[int], least: int, most: int
) -> tuple[CurvePoint, ...]:
    decode, uniform = curves.whole.decode, curves.uniform.decode
    spaced = (int(length) for length in np.geomspace(min(least or most, most), most, _CURVE_COUNT))
    return tuple(
        CurvePoint(
            length,
            decode.tally(length).hit_rate,
            uniform.tally(length).hit_rate,
        )
        for length in sorted({*budgets, *spaced})
    )
