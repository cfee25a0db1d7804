"""Simulation: traces run through caches of every policy, at any budgets."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import FamilyShape, ModelShape
from moepack.common.sizes import Size, as_list, parse_ranges, parse_size, size_text
from moepack.traces.caching import cache as caching
from moepack.traces.formats.reading import AnyTrace, TracedModel, TraceFiles, opened
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.simulation.caches import BELADY, STATIC, Caches
from moepack.traces.simulation.curves import LruCurves
from moepack.traces.simulation.facts import LEAST_SELECTIONS, CurvePoint, Simulation
from moepack.traces.simulation.lookups import Lookups, LookupStream, interleaved
from moepack.traces.spool import Spool, SpooledTrace

Facts = TypeVar("Facts")

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
    slots: int | Sequence[int] = (),
    policies: str | Sequence[str] | None = None,
    batch_count: int | None = None,
    sessions: int = 1,
    prefetch: int | None = None,
    layers: str | Collection[int] | None = None,
    options: ReadOptions = ReadOptions(),
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """Simulate caches of experts on traces.

    `paths` are files, or what `read_trace` returned. `budgets` are bytes, texts such as `2GiB`, or
    `25%` of all experts, one or several; by default a dozen from the experts of one token to the
    whole model. `policies` are some of POLICIES, by default all. `slots` are experts of each layer,
    for LRU caches by layer. Prompts are computed in batches of `batch_count` tokens, by default at
    once. `sessions` requests run at a time, in turns call by call. With `prefetch`, this number of
    experts per layer, the most recently used ones, is prefetched. With `layers` (numbers, or
    `0-3,7`) all others are left out. The bytes of experts are those of `model` (a source, a pack,
    open or not, or a shape), else those that the traces state. `progress` is called with 1 after
    each cache, and the number of all caches.

    Raises TraceError for faults in a file, and for counts without tokens; RequestError for invalid
    options, for budgets below the experts of one token in a layer, and if no bytes are known.
    """
    trace = opened(paths, options, model, takes_stated=True)
    policies = list(dict.fromkeys(POLICIES if policies is None else as_list(policies)))
    slots = as_list(slots)
    counts = {"sessions": sessions, "batch_count": batch_count, "prefetch": prefetch}
    _check_options(policies, {**counts, "slots": min(slots, default=None)})
    layers = None if layers is None else _layers(layers)
    shape = _run_shape(trace.shape, layers)
    routed, total = shape.routed, shape.routed_length
    requested = [parse_size(one, "budgets", whole=total) for one in as_list(budgets)]
    with ExitStack() as stack:
        caches, warnings = _read(trace, shape, batch_count, sessions, stack)
        stream, curves = caches.stream, caches.curves
        # The bytes that a decoded token used in each layer; none if none was decoded.
        used = [family.expert_length * stream.used(layer) for layer, family in routed.items()]
        lengths = _budgets(requested, used, total)
        _check_slots(slots, routed, stream)
        count = len(lengths) * (len(policies) + (prefetch is not None))
        advance = partial(progress or (lambda done, total: None), 1, count)
        results = chain.from_iterable(caches.evaluate(policy, lengths) for policy in policies)
        prefetches = caches.evaluate_prefetching(prefetch, lengths) if prefetch else ()
        by_slots = map(caches.evaluate_slots, dict.fromkeys(slots))
        all_results = (*_noted(results, advance), *by_slots)
        all_prefetches = tuple(_noted(prefetches, advance))
    whole = curves.whole
    per_expert = (whole.decode.count or whole.prefill.count) / 2 / shape.routed_count
    enough = whole.decode.least_budget(1 - _LEAST_LOSS)
    return Simulation(
        token_count=stream.steps.token_count,
        decode_token_count=stream.decode_token_count,
        request_count=stream.steps.request_count,
        batch_count=batch_count,
        session_count=sessions,
        expert_length=total,
        step_length=sum(used) or None,
        enough_length=None if enough is None else max(enough, max(used)),
        cold_share=whole.decode.cold_count / whole.decode.count if whole.decode.count else None,
        lookups_per_expert=per_expert,
        is_long_enough=per_expert >= LEAST_SELECTIONS,
        results=all_results,
        prefetches=all_prefetches,
        curve=_curve(curves, lengths, sum(used) or max(used), total),
        unknown=tuple(sorted(stream.unknown)),
        warnings=warnings + stream.left_out,
    )


def _noted(facts: Iterable[Facts], note: Callable[[], None]) -> Iterator[Facts]:
    for one in facts:
        note()
        yield one


def _check_options(policies: Sequence[str], counts: Mapping[str, int | None]) -> None:
    for policy in policies:
        if policy not in POLICIES:
            raise RequestError("no such policy", expected=", ".join(POLICIES), found=policy)
    for name, count in counts.items():
        if count is not None and count < 1:
            raise RequestError("not a count", argument=name, expected="1 or more", found=count)


def _layers(layers: str | Collection[int]) -> Collection[int]:
    try:
        return parse_ranges(layers) if isinstance(layers, str) else layers
    except ValueError as error:
        raise RequestError(f"not a list of layers: {error}", argument="layers") from None


def _read(
    trace: TraceFiles | SpooledTrace,
    shape: ModelShape,
    batch_count: int | None,
    sessions: int,
    stack: ExitStack,
) -> tuple[Caches, Counter[str]]:
    """Read traces, once; return the caches of their lookups, and warnings.

    `stack` closes the spools. Raises TraceError for no tokens, RequestError for too few requests.
    """
    curves, spool = LruCurves(shape.routed), stack.enter_context(Spool())
    in_order = spool if sessions == 1 else stack.enter_context(Spool())

    def add(lookups: Lookups) -> None:
        curves.add(lookups)
        spool.add(lookups)

    stream = LookupStream(add if sessions == 1 else in_order.add, shape.routed, batch_count)
    # Experts have places in their order, whatever comes first in a trace.
    for layer, family in shape.routed.items():
        experts = np.arange(family.expert_count).astype(np.uint16)
        stream.places.index_of(np.full_like(experts, layer), experts)
    warnings = trace.feed(stream.add)
    stream.end()
    if not stream.steps.token_count:
        hint = "only counts are known, a cache needs tokens in their order: moepack trace record"
        raise TraceError("no tokens in it", path=trace.paths[0], hint=hint)
    if sessions > stream.steps.request_count:
        raise RequestError(
            "fewer requests than sessions",
            argument="sessions",
            expected=f"up to {stream.steps.request_count:,}",
            found=sessions,
            hint="a trace without request borders counts as one request",
        )
    for group in interleaved(in_order, sessions) if sessions > 1 else ():
        add(group)
    return Caches(shape, stream, curves, spool), warnings


def _run_shape(shape: ModelShape | None, layers: Collection[int] | None) -> ModelShape:
    """Return the shape of the layers that llama.cpp runs. Raises RequestError without any."""
    if shape is None:
        problem = "the bytes of an expert are not known"
        hint = "`model` names the source or the pack that was traced; a pipe cannot state them"
        raise RequestError(problem, hint=hint)
    run = (shape if layers is None else shape.of_layers(layers)).without_mtp()
    if not run.routed:
        raise RequestError("the model has no layer with routed experts")
    return run


def _check_slots(
    slots: Sequence[int], routed: Mapping[int, FamilyShape], stream: LookupStream
) -> None:
    least = max(stream.used(layer) for layer in routed)
    if min(slots, default=least) < least:
        problem = "slots for fewer experts than a token uses in a layer"
        expected = f"at least {least}"
        raise RequestError(problem, argument="slots", expected=expected, found=min(slots))


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
    decode, uniform, shared = curves.whole.decode, curves.uniform.decode, curves.shared
    spaced = (int(length) for length in np.geomspace(min(least or most, most), most, _CURVE_COUNT))
    return tuple(
        CurvePoint(
            length,
            decode.tally(length).hit_rate,
            uniform.tally(length).hit_rate,
            shared.tally(length).hit_count / decode.count if decode.count else None,
        )
        for length in sorted({*budgets, *spaced})
    )
