"""Traces as calls take them: held against a model, read once for several calls, imported."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from moepack.common.paths import PathOrPaths, path_list, path_texts
from moepack.common.shape import ModelShape
from moepack.pack.opening.open_model import Model, pack_or_source
from moepack.pack.reading.pack import Pack
from moepack.source.experts import find_experts
from moepack.source.experts import shape_of as shape_of_source
from moepack.traces.file import CUT
from moepack.traces.file_writer import Writer, check_target
from moepack.traces.formats.registry import AnyTrace, Contents, ReadOptions, feed, stated_shape
from moepack.traces.model import Item, Origin
from moepack.traces.spool import SpooledTrace
from moepack.traces.steps import TraceCounter, TraceSummary

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


def read_trace(
    paths: PathOrPaths, *, model: TracedModel | None = None, options: ReadOptions = ReadOptions()
) -> SpooledTrace:
    """Read traces, imatrices and hotness files once, for several of the calls that take traces.

    The result is a context manager, and keeps the selections in a temporary file until it is left.
    With `model` (a source, a pack, open or not, or a shape) selections that it cannot have made are
    refused. Raises TraceError for faults in a file, RequestError without a file, and for one with
    the same selections as another, MachineError for system errors.
    """
    files, options = path_texts(paths, "paths"), options_of(options, model)
    trace = SpooledTrace(files, options.shape or stated_shape(files))
    try:
        trace.warnings = feed(files, options._replace(shape=trace.shape), trace.add)
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
    append: bool = False,
    force: bool = False,
    options: ReadOptions = ReadOptions(),
) -> TraceSummary:
    """Write files of any format to the trace file `target`, or add them to it if `append`.

    With `model` (a source, a pack, open or not, or a shape) selections that it cannot have made are
    refused. The file appears when it is whole; after an error it is as before. Raises RequestError
    if it exists and neither `append` nor `force` is given, or if it has the selections of an added
    file already; TraceError for faults in a file; MachineError for system errors.
    """
    paths, options = path_texts(paths, "paths"), options_of(options, model)
    path, shape = os.fspath(target), options.shape
    check_target(path, append=append, force=force)
    whole, contents = TraceCounter(), Contents()
    with Writer(path, append=append) as writer:
        for item in writer.held_items():
            whole.add(item)
            contents.add(item)
        contents.end(path)
        added = TraceCounter()
        warnings = Counter([CUT] * writer.was_cut)

        def add(item: Item) -> None:
            if isinstance(item, Origin) and item.expert_counts is None and shape is not None:
                item = replace(item, expert_counts=shape.expert_counts)
            for consume in (writer.add, whole.add, added.add):
                consume(item)

        warnings += feed(paths, options, add, contents=contents)
    return whole.summary(path, added.totals, warnings)
