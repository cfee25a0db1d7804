"""moepack: the experts of a Mixture-of-Experts GGUF as aligned, indexed, proven blobs.

    import moepack

    pack = moepack.open("model.moepack")
    where = pack.locate(layer=3, expert=17)
    with pack.reader() as reader:
        view = reader.read(3, 17, "up")

Each command of the command line is one call here: `pack_model`, `verify`, `inspect` and so on.
`import moepack` loads the reading side alone; what else a call needs comes with its first use.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from moepack.errors import (
    MachineError,
    MoepackError,
    PackError,
    RequestError,
    SourceError,
    TraceError,
)
from moepack.reading.batch import Batch, ExpertBytes
from moepack.reading.budget import Statistics
from moepack.reading.pack import BlobLocation, Pack, PartLocation
from moepack.reading.reader import Reader
from moepack.storage.buffers import BufferPool

if TYPE_CHECKING:
    from moepack.analysis.concentration import concentration as concentration
    from moepack.analysis.statistics import trace_statistics as trace_statistics
    from moepack.hotness.measure import measure_hotness as measure_hotness
    from moepack.report.inspection import shape_of as shape_of
    from moepack.trace.formats.registry import ReadOptions as ReadOptions
    from moepack.trace.importing import import_trace as import_trace
    from moepack.trace.recording.recording import record_trace as record_trace

_LATE = {
    "ReadOptions": "trace.formats.registry",
    "concentration": "analysis.concentration",
    "import_trace": "trace.importing",
    "measure_hotness": "hotness.measure",
    "record_trace": "trace.recording.recording",
    "shape_of": "report.inspection",
    "trace_statistics": "analysis.statistics",
}
"""The calls that load their rooms when they are first used, and where they are."""

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BlobLocation",
    "BufferPool",
    "ExpertBytes",
    "MachineError",
    "MoepackError",
    "Pack",
    "PackError",
    "PartLocation",
    "Reader",
    "RequestError",
    "SourceError",
    "Statistics",
    "TraceError",
    "__version__",
    "open",
    *_LATE,
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'moepack' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"moepack.{_LATE[name]}"), name)
    globals()[name] = value
    return value


def open(path: str | os.PathLike[str]) -> Pack:
    """Open the pack in the directory `path`.

    Checks the manifest, the index's digest and its tables. Raises PackError where the pack is not
    whole, damaged, or of a version that this reader does not know.
    """
    return Pack(path)
