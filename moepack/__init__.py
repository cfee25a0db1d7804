"""moepack: the experts of a Mixture-of-Experts GGUF as aligned, indexed, proven blobs.

    import moepack

    pack = moepack.open("model.moepack")  # or a GGUF
    where = pack.locate(layer=3, expert=17)
    with pack.reader() as reader:
        view = reader.read(3, 17, "up")

Each command of the command line is one call here: `pack_model`, `verify`, `inspect` and so on.
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
    from moepack.analysis.concentration import concentration
    from moepack.analysis.statistics import trace_statistics
    from moepack.bench.machine import measure_machine
    from moepack.bench.run import bench_pack
    from moepack.diagnosis.doctor import doctor
    from moepack.engines.stock_gguf import export_gguf
    from moepack.forecasting.forecast import forecast
    from moepack.forecasting.misses import WorkingSet
    from moepack.forecasting.published import published_formula
    from moepack.hotness.measure import measure_hotness
    from moepack.mounting.mount import mount
    from moepack.packing.mirror import mirror_pack, remove_mirror
    from moepack.packing.pack_model import pack_model
    from moepack.packing.ranking import rank_pack
    from moepack.packing.restore import restore
    from moepack.packing.shard_index import index_model
    from moepack.paths import PathOrPaths
    from moepack.placing.place import place
    from moepack.programs.calls import run, serve
    from moepack.programs.learned import forget_learned, learned_facts, learned_hotness
    from moepack.programs.sampling import Sampling
    from moepack.report.inspection import inspect
    from moepack.report.listing import list_pack
    from moepack.shape import ModelShape
    from moepack.simulation.simulate import simulate
    from moepack.trace.formats.importing import import_trace
    from moepack.trace.formats.registry import ReadOptions
    from moepack.trace.formats.routing import Routing, Token, Trace, open_trace
    from moepack.trace.formats.traced_model import shape_of
    from moepack.trace.recording.recording import record_trace
    from moepack.verifying.verifier import verify

if TYPE_CHECKING or not _STARTS_PROGRAM:
    from moepack.errors import (
        MachineError,
        MirrorWarning,
        MoepackError,
        PackError,
        RequestError,
        SourceError,
        TraceError,
    )
    from moepack.keys import ExpertKey
    from moepack.reading.batch import Batch, ExpertBytes
    from moepack.reading.budget import Statistics
    from moepack.reading.locations import (
        BlobLocation,
        ExpertHotness,
        PartLocation,
        TensorLocation,
    )
    from moepack.reading.pack import Pack
    from moepack.reading.reader import Reader
    from moepack.storage.buffers import BufferPool
    from moepack.version import __version__

_ROOMS = {
    "Batch": "reading.batch",
    "BlobLocation": "reading.locations",
    "BufferPool": "storage.buffers",
    "ExpertBytes": "reading.batch",
    "ExpertHotness": "reading.locations",
    "ExpertKey": "keys",
    "MachineError": "errors",
    "MirrorWarning": "errors",
    "ModelShape": "shape",
    "MoepackError": "errors",
    "Pack": "reading.pack",
    "PackError": "errors",
    "PartLocation": "reading.locations",
    "ReadOptions": "trace.formats.registry",
    "Reader": "reading.reader",
    "RequestError": "errors",
    "Routing": "trace.formats.routing",
    "Sampling": "programs.sampling",
    "SourceError": "errors",
    "Statistics": "reading.budget",
    "TensorLocation": "reading.locations",
    "Token": "trace.formats.routing",
    "Trace": "trace.formats.routing",
    "TraceError": "errors",
    "WorkingSet": "forecasting.misses",
    "__version__": "version",
    "bench_pack": "bench.run",
    "concentration": "analysis.concentration",
    "doctor": "diagnosis.doctor",
    "export_gguf": "engines.stock_gguf",
    "forecast": "forecasting.forecast",
    "forget_learned": "programs.learned",
    "import_trace": "trace.formats.importing",
    "index_model": "packing.shard_index",
    "inspect": "report.inspection",
    "learned_facts": "programs.learned",
    "learned_hotness": "programs.learned",
    "list_pack": "report.listing",
    "measure_hotness": "hotness.measure",
    "measure_machine": "bench.machine",
    "mirror_pack": "packing.mirror",
    "mount": "mounting.mount",
    "pack_model": "packing.pack_model",
    "open_trace": "trace.formats.routing",
    "place": "placing.place",
    "published_formula": "forecasting.published",
    "rank_pack": "packing.ranking",
    "record_trace": "trace.recording.recording",
    "remove_mirror": "packing.mirror",
    "restore": "packing.restore",
    "run": "programs.calls",
    "serve": "programs.calls",
    "shape_of": "trace.formats.traced_model",
    "simulate": "simulation.simulate",
    "trace_statistics": "analysis.statistics",
    "verify": "verifying.verifier",
}
"""The modules that names come from which are not loaded yet when they are first used."""

__all__ = [
    "Batch",
    "BlobLocation",
    "BufferPool",
    "ExpertBytes",
    "ExpertHotness",
    "ExpertKey",
    "MachineError",
    "MirrorWarning",
    "ModelShape",
    "MoepackError",
    "Pack",
    "PackError",
    "PartLocation",
    "ReadOptions",
    "Reader",
    "RequestError",
    "Routing",
    "Sampling",
    "SourceError",
    "Statistics",
    "TensorLocation",
    "Token",
    "Trace",
    "TraceError",
    "WorkingSet",
    "__version__",
    "bench_pack",
    "concentration",
    "doctor",
    "export_gguf",
    "forecast",
    "forget_learned",
    "import_trace",
    "index_model",
    "inspect",
    "learned_facts",
    "learned_hotness",
    "list_pack",
    "measure_hotness",
    "measure_machine",
    "mirror_pack",
    "mount",
    "open",
    "open_trace",
    "pack_model",
    "place",
    "published_formula",
    "rank_pack",
    "record_trace",
    "remove_mirror",
    "restore",
    "run",
    "serve",
    "shape_of",
    "simulate",
    "trace_statistics",
    "verify",
]


if not TYPE_CHECKING:  # whom it would tell that any name exists

    def __getattr__(name):
        if name not in _ROOMS:
            raise AttributeError(f"module 'moepack' has no attribute {name!r}")
        # Not importlib, which opens a file: whoever catches "too many open files" may come here.
        module = __import__(f"moepack.{_ROOMS[name]}", fromlist=[name])
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def open(path: "PathOrPaths") -> "Pack":
    """Open the pack in the directory `path`, or a GGUF as it lies.

    Of a pack it checks the manifest, the index's digest and its tables. A GGUF is named by any of
    its shards, its folder or a list of all shards; its index is made in memory, so that it is used
    as a pack made by `index_model`, without digests.

    Raises PackError where the pack is not whole, damaged, or of a version that this reader does not
    know; SourceError for a GGUF that is at fault; RequestError for what is no path.
    """
    from moepack.reading.directory import pack_path
    from moepack.reading.pack import Pack

    folder = pack_path(path)
    if folder is not None:
        return Pack(folder)
    from moepack.packing.shard_index import open_as_they_lie  # here, since packs do without it

    return open_as_they_lie(path)
