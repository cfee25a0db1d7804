"""moepack: the experts of a Mixture-of-Experts GGUF as aligned, indexed, proven blobs.

    import moepack

    pack = moepack.open("model.moepack")
    where = pack.locate(layer=3, expert=17)
    with pack.reader() as reader:
        view = reader.read(3, 17, "up")

`import moepack` loads the reading side alone; what else a call needs comes with its first use.
"""

import sys

TYPE_CHECKING = False
_PROGRAM = (getattr(sys, "argv", None) or [""])[0].replace("\\", "/").rpartition("/")[2]
_STARTS_PROGRAM = _PROGRAM in ("-m", "moepack", "moepack.exe")
"""Whether this may be the program's start (`python -m moepack`, or the command).

It is best interrupted in moepack.__main__, which says so in a line. So nothing is loaded here then,
but where it is first used. Where the guess is wrong, only the moment of loading differs.
"""

if TYPE_CHECKING:
    from moepack.bench.run import bench_pack
    from moepack.report.inspection import inspect

if TYPE_CHECKING or not _STARTS_PROGRAM:
    import os

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
"""The modules that names come from which are not loaded yet when they are first used."""

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
