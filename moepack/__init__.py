"""moepack: the experts of a Mixture-of-Experts GGUF as aligned, indexed, proven blobs.

    import moepack

    pack = moepack.open("model.moepack")
    where = pack.locate(layer=3, expert=17)
    with pack.reader() as reader:
        view = reader.read(3, 17, "up")

`import moepack` is the reading side alone; what packing and verifying need lives in modules of its
own, which the command line imports.
"""

import os

from moepack.errors import (
    MachineError,
    MoepackError,
    PackError,
    RequestError,
    SourceError,
    TraceError,
)
from moepack.keys import ExpertKey
from moepack.reading.batch import Batch, ExpertBytes
from moepack.reading.budget import Statistics
from moepack.reading.catalog import BlobLocation, PartLocation
from moepack.reading.pack import Pack
from moepack.reading.reader import Reader
from moepack.shape import ModelShape
from moepack.storage.buffers import BufferPool

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BlobLocation",
    "BufferPool",
    "ExpertBytes",
    "ExpertKey",
    "MachineError",
    "ModelShape",
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
]


def open(path: str | os.PathLike[str]) -> Pack:
    """Open the pack in the directory `path`.

    Checks the manifest, the index's digest and its tables. Raises PackError where the pack is not
    whole, damaged, or of a version that this reader does not know.
    """
    return Pack(path)
