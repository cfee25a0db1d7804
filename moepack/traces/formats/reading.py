"""Reading a trace once, for several calls."""

from collections.abc import Iterator
from contextlib import contextmanager

from moepack.common.paths import PathOrPaths, path_list, path_texts
from moepack.traces.formats.registry import AnyTrace, ReadOptions, feed, stated_shape
from moepack.traces.formats.traced_model import TracedModel, options_of
from moepack.traces.spooled import SpooledTrace


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
