"""moepack: the experts of a Mixture-of-Experts GGUF as aligned, indexed, proven blobs.

    import moepack

    pack = moepack.open("model.moepack")
    where = pack.locate(layer=3, expert=17)
    with pack.reader() as reader:
        view = reader.read(3, 17, "up")

`import moepack` loads nothing by itself: a name brings the room that it comes from when it is first
used. So reading needs nothing that only packing needs, and the program starts at once.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from moepack.bench.run import bench_pack
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
    from moepack.report.inspection import inspect
    from moepack.storage.buffers import BufferPool

_ROOMS = {
    "Batch": "reading.batch",
    "BlobLocation": "reading.pack",
    "BufferPool": "storage.buffers",
    "ExpertBytes": "reading.batch",
    "MachineError": "errors",
    "MoepackError": "errors",
    "Pack": "reading.pack",
    "PackError": "errors",
    "PartLocation": "reading.pack",
    "Reader": "reading.reader",
    "RequestError": "errors",
    "SourceError": "errors",
    "Statistics": "reading.budget",
    "TraceError": "errors",
    "bench_pack": "bench.run",
    "inspect": "report.inspection",
}
"""What stands behind this door, and the module it comes from when it is first used."""

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
    "bench_pack",
    "inspect",
    "open",
]


if not TYPE_CHECKING:  # whom it would tell that any name exists

    def __getattr__(name):
        if name not in _ROOMS:
            raise AttributeError(f"module 'moepack' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"moepack.{_ROOMS[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def open(path: "str | os.PathLike[str]") -> "Pack":
    """Open the pack in the directory `path`.

    Checks the manifest, the index's digest and its tables. Raises PackError where the pack is not
    whole, damaged, or of a version that this reader does not know.
    """
    from moepack.reading.pack import Pack

    return Pack(path)
