"""Traces as calls take them: held against a model, read once for several calls, imported."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moepack.common import digest
from moepack.common.errors import RequestError, TraceError
from moepack.common.paths import PathOrPaths, path_list, path_texts
from moepack.common.shape import ModelShape
from moepack.pack.opening.open_model import Model, pack_or_source
from moepack.pack.reading.pack import Pack
from moepack.source.experts import find_experts
from moepack.source.experts import shape_of as shape_of_source
from moepack.traces.file_writer import Writer, check_target
from moepack.traces.formats.registry import ReadOptions, read
from moepack.traces.model import Item, Items, Origin, Tokens
from moepack.traces.spool import SpooledTrace
from moepack.traces.steps import TraceCounter, TraceSummary
from moepack.traces.validation import Checks

TracedModel = Model | ModelShape
"""The path of a pack or a source, an open pack, or a shape."""


def shape_of(model: TracedModel) -> ModelShape:
    """Return the shape of a model: the layers with experts, their numbers, and their bytes.

    `model` is a pack's directory, any shard of a GGUF, its folder or a list of all shards, or an
    open pack. Raises SourceError or PackError for faults in the model, RequestError without a path.
    """
    if isinstance(model, ModelShape):
        return model
    with pack_or_source(model) as named:
        if isinstance(named, Pack):
            return named.shape
        return shape_of_source(named, find_experts(named))


def options_of(options: ReadOptions, model: TracedModel | None) -> ReadOptions:
    """Return options with the shape of a model, if there is one. Raises as `shape_of`."""
    return options if model is None else options._replace(shape=shape_of(model))


class Contents:
    """Notices files with the same selections as an earlier one.

    The two halves that hotness is judged by would be copies of each other, and anything would look
    as if it were worth pinning.
    """

    def __init__(self) -> None:
        self._before: set[bytes] = set()
        self._columns = [digest.stream() for _ in range(4)]
        """Digests of the columns of a file, however these are cut."""

    def add(self, item: Item) -> None:
        """Add the next piece of a file."""
        if isinstance(item, Origin):
            return
        numbers = np.diff(item.starts) if isinstance(item, Tokens) else item.counts
        phase = item.phase if isinstance(item, Tokens) else np.full(1, item.phase, np.uint8)
        columns = (item.layer, item.expert, numbers, phase)
        for column, values in zip(self._columns, columns, strict=True):
            column.update(np.ascontiguousarray(values).data)

    def end(self, path: str) -> None:
        """End a file. Raises RequestError if its selections came before."""
        value = b"".join(column.digest() for column in self._columns)
        self._columns = [digest.stream() for _ in range(4)]
        if value in self._before:
            hint = "leave it out: a copy adds no information"
            raise RequestError("its selections came already", path=path, hint=hint)
        self._before.add(value)


class TraceFiles(NamedTuple):
    """The files of a trace, of one model, to be read in turn."""

    paths: Sequence[str]
    options: ReadOptions

    @property
    def shape(self) -> ModelShape | None:
        """The shape of the model that they are held against."""
        return self.options.shape

    def feed(self, *consumers: Callable[[Item], object]) -> Counter[str]:
        """Hand each piece to all `consumers`; return how much was left out, by problem.

        Raises what `registry.read` and the consumers raise, and RequestError for a file with the
        same selections as an earlier one.
        """
        warnings: Counter[str] = Counter()
        contents = Contents()
        for path in self.paths:
            try:
                for item in read_file(path, self.options, contents, warnings):
                    for consume in consumers:
                        consume(item)
            except TraceError as error:
                error.path = error.path or path
                raise
        return warnings


AnyTrace = PathOrPaths | SpooledTrace
"""The files of a trace, or one that was read already."""


def read_file(path: str, options: ReadOptions, contents: Contents, warnings: Counter[str]) -> Items:
    """Read one of the files that belong together; `warnings` counts items left out, by problem.

    Raises what `registry.read` raises, and RequestError if its selections came before in
    `contents`.
    """
    checks = Checks(path, options.shape, options.lenient)
    for item in read(path, checks, options.format):
        contents.add(item)
        yield item
    contents.end(path)
    warnings += checks.warnings


def opened(
    trace: AnyTrace, options: ReadOptions, model: TracedModel | None
) -> TraceFiles | SpooledTrace:
    """Return a trace that a call was given, as what hands out its pieces.

    Raises RequestError without a file, and for a trace that was read for another model.
    """
    options = options_of(options, model)
    if isinstance(trace, SpooledTrace):
        trace.require(options.shape)
        return trace
    return TraceFiles(path_texts(trace, "paths"), options)


def read_trace(
    paths: PathOrPaths, *, model: TracedModel | None = None, options: ReadOptions = ReadOptions()
) -> SpooledTrace:
    """Read traces, imatrices and hotness files once, for several of the calls that take traces.

    The result is a context manager, and keeps the selections in a temporary file until it is left.
    With `model` (a source, a pack, open or not, or a shape) selections that it cannot have made are
    refused. Raises TraceError for faults in a file, RequestError without a file, and for one with
    the same selections as another, MachineError for system errors.
    """
    files = opened(paths, options, model)
    trace = SpooledTrace(files.paths, files.shape)
    try:
        trace.warnings = files.feed(trace.add)
    except BaseException:
        trace.close()
        raise
    return trace


@contextmanager
def spooled(trace: AnyTrace, options: ReadOptions) -> Iterator[SpooledTrace | None]:
    """Yield a trace, which is read now unless the caller read it already; None without a file.

    Raises as `read_trace`, and RequestError for one that was read for another model.
    """
    if isinstance(trace, SpooledTrace):
        trace.require(options.shape)
        yield trace
    elif path_list(trace):
        with read_trace(trace, options=options) as own:
            yield own
    else:
        yield None


def import_trace(
    paths: PathOrPaths,
    target: str | os.PathLike[str],
    *,
    model: TracedModel | None = None,
    force: bool = False,
    options: ReadOptions = ReadOptions(),
) -> TraceSummary:
    """Write files of any format to the trace file `target`.

    With `model` (a source, a pack, open or not, or a shape) selections that it cannot have made are
    refused. The file appears when it is whole; after an error it is as before. Raises RequestError
    if it exists and `force` is not given, and for a file with the same selections as another;
    TraceError for faults in a file; MachineError for system errors.
    """
    paths, options = path_texts(paths, "paths"), options_of(options, model)
    path, shape = os.fspath(target), options.shape
    check_target(path, force=force)
    counter = TraceCounter()
    with Writer(path) as writer:

        def add(item: Item) -> None:
            if isinstance(item, Origin) and item.expert_counts is None and shape is not None:
                item = replace(item, expert_counts=shape.expert_counts)
            writer.add(item)
            counter.add(item)

        warnings = TraceFiles(paths, options).feed(add)
    return counter.summary(path, counter.totals, warnings)
