"""Import traces: files of any format become one trace file."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from moepack.errors import RequestError
from moepack.shape import ModelShape
from moepack.trace.file import CUT
from moepack.trace.file_writer import Writer, refuse_existing
from moepack.trace.formats.registry import ReadOptions, feed
from moepack.trace.model import Item, Origin
from moepack.trace.summary import ContentDigest, TraceCounter, TraceSummary


def import_trace(
    paths: Sequence[str],
    target: str | os.PathLike[str],
    *,
    append: bool = False,
    options: ReadOptions = ReadOptions(),
) -> TraceSummary:
    """Write files of any format to the trace file `target`, or add them to it where `append`.

    The file appears when it is whole; where anything is wrong, it stays as it was. Raises
    RequestError where it exists already, or holds the very selections of a file that is added;
    TraceError for what is wrong in a file; MachineError for what the system refuses.
    """
    path = os.fspath(target)
    refuse_existing(path, append)
    whole, contents = TraceCounter(), _Contents()
    with Writer(path, append=append) as writer:
        for item in writer.held_items():
            whole.add(item)
            contents.add(item)
        contents.end()
        added = TraceCounter()
        warnings = Counter([CUT] * writer.was_cut)

        def add(item: Item) -> None:
            item = _described(item, options.shape)
            for take in (writer.add, whole.add, added.add, contents.add):
                take(item)

        for source in paths:
            contents.path = source
            warnings += feed([source], options, add)
            contents.end()
    return whole.summary(path, added.totals, warnings)


def _described(item: Item, shape: ModelShape | None) -> Item:
    """Let an origin say which experts there are, where it does not and the model does."""
    if isinstance(item, Origin) and item.expert_counts is None and shape is not None:
        return replace(item, expert_counts=shape.expert_counts)
    return item


class _Contents:
    """Notices selections that are added a second time.

    The two halves that hotness is judged by would be copies of each other, and anything would look
    as if it were worth pinning.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self._seen: set[bytes] = set()
        self._current = ContentDigest()

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        if isinstance(item, Origin):
            self.end()
        else:
            self._current.add(item)

    def end(self) -> None:
        """Take the end of a file, or of one of its origins."""
        value, self._current = self._current.value, ContentDigest()
        if value is None:
            return
        if value in self._seen and self.path is not None:
            hint = "leave it out: a copy adds no information"
            raise RequestError("its selections are in the trace already", path=self.path, hint=hint)
        self._seen.add(value)
