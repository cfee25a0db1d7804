"""Simulation: traces run through caches of every policy, at the budgets that are asked for."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np

from moepack.caching import cache as caching
from moepack.errors import RequestError, TraceError
from moepack.paths import PathOrPaths, path_texts
from moepack.shape import FamilyShape, ModelShape
from moepack.simulation.caches import BELADY, PROMPT_STATIC, STATIC, Caches
from moepack.simulation.curves import LruCurves
from moepack.simulation.facts import LEAST_SELECTIONS, CurvePoint, Simulation
from moepack.simulation.lookups import LookupStream
from moepack.simulation.one_pass import OnePass
from moepack.simulation.sessions import interleaved
from moepack.simulation.spool import Spool
from moepack.sizes import Size, as_list, parse_ranges, parse_size, size_text
from moepack.trace.formats.registry import ReadOptions, feed, stated_shape
from moepack.trace.formats.traced_model import TracedModel, options_of

POLICIES = (BELADY, *caching.POLICIES, STATIC, PROMPT_STATIC)
"""What can be simulated; what `moepack.caching` has can be run as well."""

_BUDGET_COUNT = 12
_CURVE_COUNT = 64
_LEAST_LOSS = 0.01


def simulate(
    paths: PathOrPaths,
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

    `budgets` are bytes, texts such as `2GiB`, or `25%` of all experts, one or several; by default a
    dozen from what a token uses to the whole model. `policies` are some of POLICIES, by default
    all. `slots` are experts of each layer, of which LRU caches are simulated too. Prompts are
    computed in batches of `batch_count` tokens, by default at once. `sessions` requests run at a
    time, in turns call by call. With `prefetch` so many experts a layer are read ahead: those that
    it used last. With `layers` (numbers, or `0-3,7`) all others are left out. The bytes of experts
    are those of `model` (a source, a pack, open or not, or a shape), else those that the traces
    state. `progress` is called with the caches that are done, one at a time, and how many there are
    in all.

    Raises TraceError for what is wrong in a file, and for counts without tokens; RequestError for
    options that are none, for budgets that hold less than a token uses in a layer, and where no
    bytes are known.
    """
    paths, options = path_texts(paths, "paths"), options_of(options, model)
    policies = list(dict.fromkeys(POLICIES if policies is None else as_list(policies)))
    slots = as_list(slots)
    _check_policies(policies)
    counts = {"sessions": sessions, "batch_count": batch_count, "prefetch": prefetch}
    _check_counts({**counts, "slots": min(slots, default=None)})
    layers = None if layers is None else _layers(layers)
    stated = options.shape or stated_shape(paths)
    shape = _run_shape(stated if stated is None or layers is None else stated.of_layers(layers))
    routed, total = shape.routed, shape.routed_length
    asked = [parse_size(one, "budgets", whole=total) for one in as_list(budgets)]
    with ExitStack() as stack:
        seen = _look_up(paths, options._replace(shape=stated), routed, batch_count, sessions, stack)
        one_pass, lookups, in_order, warnings = seen
        needed = _needed(routed, lookups)
        lengths = _budgets(asked, needed, total)
        _check_slots(slots, routed, lookups)
        count = len(lengths) * (len(policies) + (prefetch is not None))
        advance = None if progress is None else partial(progress, 1, count)
        caches = Caches(shape, one_pass, lookups, in_order, advance)
        results = [facts for policy in policies for facts in caches.of(policy, lengths)]
        results += [caches.of_slots(count) for count in dict.fromkeys(slots)]
        prefetches = () if prefetch is None else caches.prefetches(prefetch, lengths)
    decode, prefill = one_pass.curves.whole.decode, one_pass.curves.whole.prefill
    per_expert = (decode.count or prefill.count) / 2 / shape.routed_count
    enough = decode.least_budget(1 - _LEAST_LOSS)
    return Simulation(
        token_count=lookups.token_count,
        decode_token_count=lookups.decode_token_count,
        request_count=lookups.request_count,
        batch_count=batch_count,
        session_count=sessions,
        expert_length=total,
        step_length=sum(needed) or None,
        enough_length=None if enough is None else max(enough, max(needed)),
        cold_share=decode.cold_count / decode.count if decode.count else None,
        lookups_per_expert=per_expert,
        is_long_enough=per_expert >= LEAST_SELECTIONS,
        results=tuple(results),
        prefetches=tuple(prefetches),
        curve=_curve(one_pass.curves, lengths, sum(needed) or max(needed), total),
        unknown=tuple(sorted(lookups.unknown)),
        warnings=warnings,
    )


class _Seen(NamedTuple):
    """What was read: lookups as they took turns, and as they stand in the trace."""

    one_pass: OnePass
    lookups: LookupStream
    in_order: Spool
    warnings: Counter[str]


def _look_up(
    paths: Sequence[str],
    options: ReadOptions,
    routed: Mapping[int, FamilyShape],
    batch_count: int | None,
    sessions: int,
    stack: ExitStack,
) -> _Seen:
    """Read traces, once; `stack` closes what was kept of them."""
    one_pass = OnePass(LruCurves(routed), stack.enter_context(Spool()))
    in_order = one_pass.spool if sessions == 1 else stack.enter_context(Spool())
    take = one_pass.add if sessions == 1 else in_order.add
    lookups = LookupStream(take, routed, batch_count)
    for layer, family in routed.items():  # places in their order, whatever comes first in a trace
        experts = np.arange(family.expert_count).astype(np.uint16)
        lookups.places.of(np.full_like(experts, layer), experts)
    warnings = feed(paths, options, lookups.add)
    lookups.end()
    if not lookups.token_count:
        hint = "only counts are known, a cache needs tokens in their order: moepack trace record"
        raise TraceError("no tokens in it", path=paths[0], hint=hint)
    if sessions > 1:
        _check_sessions(sessions, lookups.request_count)
        for group in interleaved(in_order, sessions):
            one_pass.add(group)
    return _Seen(one_pass, lookups, in_order, warnings + lookups.left_out)


def _run_shape(shape: ModelShape | None) -> ModelShape:
    """Return the shape of what llama.cpp runs. Raises RequestError where there is none."""
    if shape is None:
        problem = "the bytes of an expert are not known"
        hint = "`model` names the source or the pack that was traced; a pipe cannot state them"
        raise RequestError(problem, hint=hint)
    run = shape.without_mtp()
    if not run.routed:
        raise RequestError("the model has no layer whose router chooses experts")
    return run


def _layers(layers: str | Collection[int]) -> Collection[int]:
    try:
        return parse_ranges(layers) if isinstance(layers, str) else layers
    except ValueError as error:
        raise RequestError(f"not a list of layers: {error}", argument="layers") from None


def _needed(routed: Mapping[int, FamilyShape], lookups: LookupStream) -> list[int]:
    """Return the bytes that a decoded token used in each layer; nothing is used where none is."""
    return [family.expert_length * lookups.used(layer) for layer, family in routed.items()]


def _check_policies(policies: Sequence[str]) -> None:
    for policy in policies:
        if policy not in POLICIES:
            raise RequestError("no such policy", expected=", ".join(POLICIES), found=policy)


def _check_sessions(sessions: int, request_count: int) -> None:
    if sessions > request_count:
        raise RequestError(
            "fewer requests than sessions",
            argument="sessions",
            expected=f"up to {request_count:,}",
            found=sessions,
            hint="a trace that does not tell its requests has one",
        )


def _check_counts(counts: Mapping[str, int | None]) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise RequestError("not a count", argument=name, expected="1 or more", found=count)


def _check_slots(
    slots: Sequence[int], routed: Mapping[int, FamilyShape], lookups: LookupStream
) -> None:
    least = max(lookups.used(layer) for layer in routed)
    if min(slots, default=least) < least:
        problem = "slots for fewer experts than a token uses in a layer"
        expected = f"at least {least}"
        raise RequestError(problem, argument="slots", expected=expected, found=min(slots))


def _budgets(asked: Sequence[int], needed: Sequence[int], total: int) -> list[int]:
    least = max(needed)
    if not asked:
        start = min(sum(needed), total) or total
        return sorted({int(length) for length in np.geomspace(start, total, _BUDGET_COUNT)})
    if min(asked) < least:
        raise RequestError(
            "the budget holds less than a token uses in a layer",
            argument="budgets",
            expected=f"at least {size_text(least)}",
            found=size_text(min(asked)),
        )
    return sorted(set(asked))


def _curve(
    curves: LruCurves, budgets: Sequence[int], least: int, most: int
) -> tuple[CurvePoint, ...]:
    decode, even, shared = curves.whole.decode, curves.even.decode, curves.shared
    spaced = (int(length) for length in np.geomspace(min(least or most, most), most, _CURVE_COUNT))
    return tuple(
        CurvePoint(
            length,
            decode.tally(length).hit_rate,
            even.tally(length).hit_rate,
            shared.tally(length).hit_count / decode.count if decode.count else None,
        )
        for length in sorted({*budgets, *spaced})
    )
