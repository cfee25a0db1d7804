"""Import traces: files of any format become one trace file."""

import os
from collections import Counter
from dataclasses import replace

from moepack.common.paths import PathOrPaths, path_texts
from moepack.traces.file import CUT
from moepack.traces.file_writer import Writer, check_target
from moepack.traces.formats.reading import TracedModel, options_of
from moepack.traces.formats.registry import Contents, ReadOptions, feed
from moepack.traces.model import Item, Origin
from moepack.traces.summary import TraceCounter, TraceSummary


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
