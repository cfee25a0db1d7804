"""Import traces: files of any format become one trace file."""

import os
from collections import Counter
from dataclasses import replace

from moepack.paths import PathOrPaths, path_texts
from moepack.shape import ModelShape
from moepack.trace.contents import Contents
from moepack.trace.file import CUT
from moepack.trace.file_writer import Writer, check_target
from moepack.trace.formats.registry import ReadOptions, feed
from moepack.trace.formats.traced_model import TracedModel, options_of
from moepack.trace.model import Item, Origin
from moepack.trace.summary import TraceCounter, TraceSummary


def import_trace(
    paths: PathOrPaths,
    target: str | os.PathLike[str],
    *,
    model: TracedModel | None = None,
    append: bool = False,
    force: bool = False,
    options: ReadOptions = ReadOptions(),
) -> TraceSummary:
    """Write files of any format to the trace file `target`, or add them to it where `append`.

    With `model` (a source, a pack, open or not, or a shape) selections that it cannot have made are
    refused. The file appears when it is whole; where anything is wrong, it stays as it was. Raises
    RequestError where it exists already and neither `append` nor `force` is given, or where it
    holds the very selections of a file that is added; TraceError for what is wrong in a file;
    MachineError for what the system refuses.
    """
    paths, options = path_texts(paths, "paths"), options_of(options, model)
    path = os.fspath(target)
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
            item = _described(item, options.shape)
            for take in (writer.add, whole.add, added.add):
                take(item)

        for source in paths:
            warnings += feed([source], options, add, contents=contents)
    return whole.summary(path, added.totals, warnings)


def _described(item: Item, shape: ModelShape | None) -> Item:
    """Let an origin say which experts there are, where it does not and the model does."""
    if isinstance(item, Origin) and item.expert_counts is None and shape is not None:
        return replace(item, expert_counts=shape.expert_counts)
    return item
