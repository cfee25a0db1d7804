"""Measuring hotness: from traces of all formats, imatrices and hotness files."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from moepack.common import digest
from moepack.common.errors import TraceError
from moepack.common.paths import AnyPath, PathOrPaths, path_texts
from moepack.common.shape import ModelShape
from moepack.traces.compressed import TraceStream
from moepack.traces.formats import registry
from moepack.traces.formats.reading import TracedModel, TraceFiles, options_of
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.hotness import file
from moepack.traces.hotness.counter import SelectionCounter, by_expert
from moepack.traces.hotness.model import HeldOut, Hotness
from moepack.traces.model import MAX_COUNT, Item
from moepack.traces.steps import ALL_PHASES, DECODE_PHASES
from moepack.traces.validation import Checks


class HeldOutFacts(NamedTuple):
    """The rule that divides the halves, and the tokens of the held-out one."""

    by: str
    token_count: int | None


@dataclass(frozen=True, slots=True)
class HotnessFileFacts:
    """The facts of a hotness file that was written to `path`; see `MeasuredHotness`."""

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
    """Hotness, and notes on the files that it was counted from.

    `warnings` counts items left out, by problem; `models` are the names that the files state, of
    which there should not be two.
    """

    hotness: Hotness
    warnings: Counter[str]
    models: tuple[str, ...]

    def facts(self, path: str) -> HotnessFileFacts:
        """Return the facts of the file at `path` that it is written to."""
        hotness, held_out = self.hotness, self.hotness.held_out
        return HotnessFileFacts(
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


def load(
    path: AnyPath, shape: ModelShape | None = None, *consumers: Callable[[Item], object]
) -> Hotness:
    """Read hotness from a file: a hotness file as it is, or counted from a trace or an imatrix.

    `shape` is the model's: other selections are refused. Each piece goes to all `consumers` too.
    """
    path = os.fspath(path)
    checks = Checks(path, shape)
    with TraceStream(path) as stream:
        trace_format = registry.format_of(stream)
        if trace_format.name == "counts":
            hotness = file.read(stream, checks)
            for item in file.items_of(hotness):
                for consume in consumers:
                    consume(item)
            return hotness
        counter = SelectionCounter()
        try:
            for item in registry.read_as(trace_format, stream, checks):
                for consume in (counter.add, *consumers):
                    consume(item)
        except TraceError as error:
            error.path = error.path or path
            raise
    return _to_hotness(counter, path)


def measure_hotness(
    paths: PathOrPaths,
    *,
    model: TracedModel | None = None,
    phases: Literal["all", "decode"] = "all",
    options: ReadOptions = ReadOptions(),
) -> MeasuredHotness:
    """Count the selections of all files together.

    With `model` (a source, a pack, open or not, or a shape) selections that it cannot have made are
    refused. With `phases` of `decode` prefill is left out; unknown phases always count. Raises
    TraceError for faults in a file, and without any selection; RequestError for a file with the
    same selections as another.
    """
    paths, options = path_texts(paths, "paths"), options_of(options, model)
    counted = DECODE_PHASES if phases == "decode" else ALL_PHASES
    counter = SelectionCounter(counted)
    warnings = TraceFiles(paths, options).feed(counter.add)
    names = (origin.model for origin in counter.origins if origin.model is not None)
    hotness = _to_hotness(counter, paths[0])
    return MeasuredHotness(hotness, warnings, tuple(dict.fromkeys(names)))


def _to_hotness(counter: SelectionCounter, path: str) -> Hotness:
    """Return counts as hotness; `path` is for messages.

    Raises TraceError without any selection, or for more tokens than a pack can state.
    """
    token_count = counter.stated_token_count
    if token_count is not None and token_count > MAX_COUNT:
        problem, expected = "tokens that add up to too many", f"<= {MAX_COUNT:,}"
        raise TraceError(problem, path=path, expected=expected, found=f"{token_count:,}")
    counts = by_expert(counter.places, counter.counts)
    if not counts:
        raise TraceError(
            "nothing was counted", path=path, hint="does it have selections of these phases?"
        )
    halves = counter.halves()
    held_out = None
    if halves is not None:
        held_out_counts = by_expert(counter.places, halves.measured.counts)
        held_out = HeldOut("time", halves.measured.token_count, held_out_counts)
    hotness = Hotness(
        path=path,
        counts=counts,
        token_count=token_count,
        request_count=counter.steps.request_count if not counter.loose_count else None,
        held_out=held_out,
        origins=tuple(origin.to_json() for origin in counter.origins),
        digest=0,
    )
    return hotness._replace(digest=digest.xxh3(file.encode(hotness)))
