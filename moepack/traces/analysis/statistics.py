"""The statistics of traces: the working set, and reuse."""

from collections import Counter
from dataclasses import dataclass

from moepack.traces.analysis.reuse import Reuse, ReuseFacts
from moepack.traces.analysis.working_set import FittingWindow, WorkingSetCounter, WorkingSetRow
from moepack.traces.formats.reading import TracedModel, options_of
from moepack.traces.formats.registry import AnyTrace, ReadOptions, feed, files_of, stated_shape


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """The statistics of a trace; `warnings` counts items left out of the files, by problem."""

    window: int
    window_count: int
    request_count: int
    has_lengths: bool
    working_set: tuple[WorkingSetRow, ...]
    reuse: ReuseFacts
    warnings: Counter[str]


def trace_statistics(
    paths: AnyTrace,
    *,
    model: TracedModel | None = None,
    window: int | None = None,
    options: ReadOptions = ReadOptions(),
) -> TraceStatistics:
    """Measure the working set and the reuse of traces, in one pass over them.

    `paths` are files, or what `read_trace` returned. `window` is in tokens; by default it is the
    longest that fits, 128 at most. The working set also has bytes with a `model` (a source, a pack,
    open or not, or a shape), or if the traces state its shape. Raises TraceError for faults in a
    file, RequestError for traces of different shapes.
    """
    files, options = files_of(paths), options_of(options, model)
    shape = options.shape or stated_shape(files)
    reuse = Reuse()
    counter = FittingWindow(shape) if window is None else WorkingSetCounter(window, shape)
    warnings = feed(files, options._replace(shape=shape), counter.add, reuse.add)
    working_set = counter if isinstance(counter, WorkingSetCounter) else counter.longest
    return TraceStatistics(
        working_set.window,
        working_set.window_count,
        working_set.steps.request_count,
        shape is not None,
        working_set.rows(),
        reuse.facts(),
        warnings,
    )
