"""Measure hotness from whatever was counted: traces of all formats, imatrices, hotness files."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from moepack import digest
from moepack.errors import RequestError, TraceError
from moepack.hotness import file
from moepack.hotness.counter import SelectionCounter
from moepack.hotness.model import HeldOut, Hotness
from moepack.paths import AnyPath, PathOrPaths, path_texts
from moepack.shape import ModelShape
from moepack.trace.compressed import TraceStream
from moepack.trace.contents import Contents
from moepack.trace.formats import registry
from moepack.trace.formats.registry import ReadOptions
from moepack.trace.formats.traced_model import TracedModel, options_of
from moepack.trace.model import MAX_COUNT, Item
from moepack.trace.steps import ALL_PHASES, DECODE_PHASES
from moepack.trace.validation import Checks

MAX_WEIGHT = 1e6


class HeldOutFacts(NamedTuple):
    """What divides the halves, and how many tokens the held-out one has."""

    by: str
    token_count: int | None


@dataclass(frozen=True, slots=True)
class HotnessFacts:
    """What a hotness file that was just written at `path` holds; see `MeasuredHotness`."""

    path: str
    digest: str
    token_count: int | None
    request_count: int | None
    selection_count: int
    expert_count: int
    origins: tuple[dict[str, Any], ...]
    held_out: HeldOutFacts | None
    warnings: Counter[str]
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredHotness:
    """Hotness, and what is to be said of the files that it was counted from.

    `warnings` counts what was left out, by problem; `models` are the names of the models that the
    files say they are of, of which there should not be two.
    """

    hotness: Hotness
    warnings: Counter[str]
    models: tuple[str, ...]

    def facts(self, path: str) -> HotnessFacts:
        """Return what is to be said of it once it is written at `path`."""
        hotness, held_out = self.hotness, self.hotness.held_out
        return HotnessFacts(
            path=path,
            digest=digest.to_text(hotness.digest),
            token_count=hotness.token_count,
            request_count=hotness.request_count,
            selection_count=sum(hotness.counts.values()),
            expert_count=len(hotness.counts),
            origins=hotness.origins,
            held_out=held_out and HeldOutFacts(held_out.by, held_out.token_count),
            warnings=self.warnings,
            models=self.models,
        )


def load(path: AnyPath, shape: ModelShape | None = None) -> Hotness:
    """Read hotness from a file: a hotness file as it is, or counted from a trace or an imatrix.

    `shape` is the model's; what it cannot have chosen is refused.
    """
    path = os.fspath(path)
    checks = Checks(path, shape)
    with TraceStream(path) as stream:
        form = registry.format_of(stream)
        if form.name == "counts":
            return file.read(stream, checks)
        counter = SelectionCounter(shape=shape)
        for item in registry.read_as(form, stream, checks):
            _add(counter, item, path)
    return from_counter(counter, path)


def measure_hotness(
    paths: PathOrPaths,
    *,
    model: TracedModel | None = None,
    weights: float | Sequence[float] | None = None,
    phases: Literal["all", "decode"] = "all",
    options: ReadOptions = ReadOptions(),
) -> MeasuredHotness:
    """Count the selections of all files together, each as often as its weight says.

    With `model` (a source, a pack, open or not, or a shape) selections that it cannot have made are
    refused. With `phases` of `decode` prefill is left out; a phase that is unknown always counts.
    Raises TraceError for what is wrong in a file, and where nothing was counted; RequestError for
    weights that are none, and for a file whose selections were counted already.
    """
    paths, options = path_texts(paths, "paths"), options_of(options, model)
    weights = [1.0] * len(paths) if weights is None else weights
    weights = [weights] if isinstance(weights, int | float) else weights
    if len(weights) != len(paths) or not all(0 < weight <= MAX_WEIGHT for weight in weights):
        expected = f"{len(paths)} numbers above 0, one for each file"
        raise RequestError(
            "not weights", expected=expected, found=", ".join(f"{weight:g}" for weight in weights)
        )
    counted = DECODE_PHASES if phases == "decode" else ALL_PHASES
    counter = SelectionCounter(counted, options.shape)
    warnings: Counter[str] = Counter()
    contents = Contents()
    for path, weight in zip(paths, weights, strict=True):
        take = partial(counter.add, weight=weight)
        warnings += registry.feed([path], options, take, contents=contents)
    names = (origin.model for origin in counter.origins if origin.model is not None)
    hotness = from_counter(counter, paths[0])
    return MeasuredHotness(hotness, warnings, tuple(dict.fromkeys(names)))


def from_counter(counter: SelectionCounter, path: str) -> Hotness:
    """Turn what was counted into hotness; `path` is for messages.

    Raises TraceError where nothing was counted, or over more tokens than a pack can state.
    """
    token_count = counter.stated_token_count
    if token_count is not None and token_count > MAX_COUNT:
        problem, expected = "tokens that add up to too many", f"<= {MAX_COUNT:,}"
        raise TraceError(problem, path=path, expected=expected, found=f"{token_count:,}")
    counts = counter.by_expert(counter.counts)
    if not counts:
        raise TraceError(
            "nothing was counted", path=path, hint="has it any selections, of these phases?"
        )
    halves = counter.halves()
    held_out = None
    if halves is not None:
        measured = halves.measured
        held_out = HeldOut(halves.by, measured.token_count, counter.by_expert(measured.counts))
    hotness = Hotness(
        path=path,
        counts=counts,
        token_count=token_count,
        request_count=counter.request_count if not counter.loose_count else None,
        held_out=held_out,
        origins=tuple(origin.to_json() for origin in counter.origins),
        digest=0,
        chunk_counts=counter.chunk_counts(),
    )
    return hotness._replace(digest=digest.of(file.encode(hotness) + _encoded_chunks(hotness)))


def _add(counter: SelectionCounter, item: Item, path: str) -> None:
    try:
        counter.add(item)
    except TraceError as error:
        error.path = error.path or path
        raise


def _encoded_chunks(hotness: Hotness) -> bytes:
    """Encode what decides an order too, though a hotness file does not hold it; often nothing."""
    counts = sorted((hotness.chunk_counts or {}).items())
    return "".join(f"{key.layer},{key.expert},{count}\n" for key, count in counts).encode()
