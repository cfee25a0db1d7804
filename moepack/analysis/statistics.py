"""The statistics of traces: the working set, and how soon experts are chosen again."""

from collections import Counter
from dataclasses import dataclass

from moepack.analysis.reuse import Reuse, ReuseFacts
from moepack.analysis.working_set import FittingWindow, WorkingSet, WorkingSetRow
from moepack.paths import PathOrPaths, path_texts
from moepack.trace.formats.registry import ReadOptions, feed, stated_shape
from moepack.trace.formats.traced_model import TracedModel, options_of


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """What was found. `warnings` counts what was left out of the files, by problem."""

    window: int
    window_count: int
    request_count: int
    has_lengths: bool
    working_set: tuple[WorkingSetRow, ...]
    reuse: ReuseFacts
    warnings: Counter[str]


def trace_statistics(
    paths: PathOrPaths,
    *,
    model: TracedModel | None = None,
    window: int | None = None,
    options: ReadOptions = ReadOptions(),
) -> TraceStatistics:
    """Measure the working set and the reuse of traces, in one pass over them.

    `window` is in tokens; by default it is the longest that fits, of 128 at most. The working set
    has lengths in bytes with a `model` (a source, a pack, open or not, or a shape), or where the
    traces state its shape. Raises
    TraceError for what is wrong in a file, RequestError for traces of different shapes.
    """
    paths, options = path_texts(paths, "paths"), options_of(options, model)
    shape = options.shape or stated_shape(paths)
    fitting, reuse = FittingWindow(shape), Reuse()
    chosen = None if window is None else WorkingSet(window, shape)
    warnings = feed(paths, options._replace(shape=shape), (chosen or fitting).add, reuse.add)
    working_set = chosen or fitting.chosen
    return TraceStatistics(
        working_set.window,
        working_set.window_count,
        working_set.request_count,
        shape is not None,
        working_set.rows(),
        reuse.facts(),
        warnings,
    )
