"""Hotness from whatever was measured: traces of all formats, imatrices, hotness files."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moepack import digest
from moepack.errors import TraceError
from moepack.hotness import file
from moepack.hotness.counter import Tally
from moepack.hotness.file import MAX_COUNT, HeldOut, Hotness
from moepack.trace.compressed import Stream
from moepack.trace.formats import imatrix, registry
from moepack.trace.model import Ints, Items, Origin, Phase, Unknown
from moepack.trace.validation import Checks, Shape

_HEAD_LENGTH = 1 << 16


class Input(NamedTuple):
    """A file, and how much its selections count."""

    path: str
    weight: float = 1.0


class Options(NamedTuple):
    """How files are read: see `trace_formats.read`, `Checks` and `Tally`."""

    form: str | None = None
    shape: Shape | None = None
    lenient: bool = False
    phases: frozenset[Phase] | None = None


def load(path: str, shape: Shape | None = None) -> Hotness:
    """Read hotness from a file: as `hotness.load` does, or counted from a trace or an imatrix."""
    with Stream(path) as stream:
        if file.is_hotness(stream.peek(_HEAD_LENGTH)):
            return _decode(stream)
        checks, tally = Checks(path, shape), Tally()
        for item in _items(stream, checks, None):
            tally.add(item)
    return from_tally(tally, path)


def count(inputs: Sequence[Input], options: Options) -> tuple[Hotness, Counter[str]]:
    """Count the selections of all inputs together; give the warnings as well, by problem.

    Raises TraceError for what is wrong in a file, and where nothing was counted. Files that name
    different models are a warning.
    """
    tally = Tally(options.phases)
    warnings: Counter[str] = Counter()
    for one in inputs:
        for item in read([one.path], options, warnings):
            tally.add(item, one.weight)
    models = {origin.model for origin in tally.origins if origin.model is not None}
    if len(models) > 1:
        warnings["files of another model than the first"] = len(models) - 1
    return from_tally(tally, inputs[0].path), warnings


def read(paths: Sequence[str], options: Options, warnings: Counter[str]) -> Items:
    """Read one file after another as `items` does; add up the warnings."""
    for path in paths:
        checks = Checks(path, options.shape, options.lenient)
        yield from items(path, checks, options.form)
        warnings.update(checks.warnings)


def items(path: str, checks: Checks, form: str | None = None) -> Items:
    """Read a trace or an imatrix; a hotness file is a trace of counts."""
    with Stream(path) as stream:
        yield from _items(stream, checks, form)


def _items(stream: Stream, checks: Checks, form: str | None) -> Items:
    head = stream.peek(_HEAD_LENGTH)
    if form is None and file.is_hotness(head):
        yield from _as_items(_decode(stream), checks)
        return
    if form is None and imatrix.is_gguf(head):
        if not stream.is_plain:
            hint = "unpack it first"
            raise TraceError("an imatrix that is compressed or piped", path=stream.path, hint=hint)
        yield from imatrix.read(stream.path, checks)
        return
    imatrix.refuse_legacy(head, stream.path)
    yield from registry.read_from(stream, checks, form)


def _decode(stream: Stream) -> Hotness:
    return file.decode(stream.read_whole(file.MAX_FILE_LENGTH + 1), stream.path)


def _as_items(heat: Hotness, checks: Checks) -> Items:
    keys = np.array(sorted(heat.counts), np.int64).reshape(-1, 2)
    counts = np.array([heat.counts[key] for key in sorted(heat.counts)], np.int64)
    unknown = frozenset({Unknown.TOKENS, Unknown.REQUESTS})
    yield Origin("hotness", os.path.basename(heat.path), unknown, None, heat.token_count)
    layer, expert = keys[:, 0], keys[:, 1]
    yield checks.counts(Phase.UNKNOWN, layer, expert, counts, lambda index: f"layer {layer[index]}")


def from_tally(tally: Tally, path: str) -> Hotness:
    """Turn what was counted into hotness; `path` is for messages.

    Raises TraceError where nothing was counted, or more than a count holds.
    """
    if tally.highest > MAX_COUNT:
        problem, expected = "a count out of bounds", f"<= {MAX_COUNT}"
        raise TraceError(problem, path=path, expected=expected, found=f"{tally.highest:.4g}")
    if not tally.counts.any():
        raise TraceError("nothing was counted", path=path, hint="is there any decode in it?")
    halves = tally.halves()
    held_out = None
    if halves is not None:
        by, _, measured = halves
        held_out = HeldOut(by, measured.token_count, _by_expert(measured.counts))
    made = Hotness(
        path=path,
        counts=_by_expert(tally.counts),
        token_count=tally.stated_token_count,
        request_count=tally.request_count if not tally.loose_count else None,
        held_out=held_out,
        origins=tuple(origin.to_json() for origin in tally.origins),
        digest=0,
    )
    return made._replace(digest=digest.of(file.encode(made)))


def _by_expert(table: Ints) -> dict[tuple[int, int], int]:
    layers, experts = np.nonzero(table)
    numbers = table[layers, experts].tolist()
    keys = zip(layers.tolist(), experts.tolist(), strict=True)
    return dict(zip(keys, numbers, strict=True))
