"""moepack: the experts of a Mixture-of-Experts GGUF as aligned, indexed, proven blobs.

    import moepack

    pack = moepack.open("model.moepack")  # or a GGUF
    location = pack.locate(layer=3, expert=17)
    with pack.reader() as reader:
        view = reader.read(3, 17, "up")

Each command of the command line is one call here: `pack_model`, `verify`, `inspect` and so on.
`import moepack` loads nothing else: each name is loaded with its first use.
"""

TYPE_CHECKING = False

if TYPE_CHECKING:
    from moepack.bench.diagnosis.doctor import doctor as doctor
    from moepack.bench.machine import measure_machine as measure_machine
    from moepack.bench.run import bench_pack as bench_pack
    from moepack.bench.tuning import tune as tune
    from moepack.common.errors import MachineError as MachineError
    from moepack.common.errors import MirrorWarning as MirrorWarning
    from moepack.common.errors import MoepackError as MoepackError
    from moepack.common.errors import PackError as PackError
    from moepack.common.errors import RequestError as RequestError
    from moepack.common.errors import SourceError as SourceError
    from moepack.common.errors import TraceError as TraceError
    from moepack.common.paths import PathOrPaths
    from moepack.common.shape import ExpertKey as ExpertKey
    from moepack.common.shape import ModelShape as ModelShape
    from moepack.inspection.describe import inspect as inspect
    from moepack.inspection.listing import list_pack as list_pack
    from moepack.pack.engines.checking import verify_export as verify_export
    from moepack.pack.engines.exporting import export as export
    from moepack.pack.engines.exporting import export_formats as export_formats
    from moepack.pack.mounting.mount import mount as mount
    from moepack.pack.reading.batch import Batch as Batch
    from moepack.pack.reading.batch import ExpertBytes as ExpertBytes
    from moepack.pack.reading.in_flight import Statistics as Statistics
    from moepack.pack.reading.locations import BlobLocation as BlobLocation
    from moepack.pack.reading.locations import ExpertHotness as ExpertHotness
    from moepack.pack.reading.locations import PartLocation as PartLocation
    from moepack.pack.reading.locations import TensorLocation as TensorLocation
    from moepack.pack.reading.pack import Pack as Pack
    from moepack.pack.reading.reader import Reader as Reader
    from moepack.pack.verifying.verifier import verify as verify
    from moepack.packing.copies.mirror import mirror_pack as mirror_pack
    from moepack.packing.copies.mirror import remove_mirror as remove_mirror
    from moepack.packing.copies.pull import pull as pull
    from moepack.packing.copies.repair import repair as repair
    from moepack.packing.fetched import fetch_model as fetch_model
    from moepack.packing.pack_model import SharedPack as SharedPack
    from moepack.packing.pack_model import pack_in_place as pack_in_place
    from moepack.packing.pack_model import pack_model as pack_model
    from moepack.packing.ranking import rank_pack as rank_pack
    from moepack.packing.restore import restore as restore
    from moepack.packing.shard_index import index_model as index_model
    from moepack.planning.forecasting.comparison import compare_machines as compare_machines
    from moepack.planning.forecasting.forecast import forecast as forecast
    from moepack.planning.machine.described import describe_machine as describe_machine
    from moepack.planning.machine.described import presets as presets
    from moepack.planning.placing.place import place as place
    from moepack.report.html.report import make_report as make_report
    from moepack.running.expert_cache import CacheContext as CacheContext
    from moepack.running.expert_cache import CacheUsage as CacheUsage
    from moepack.running.expert_cache import ExpertCache as ExpertCache
    from moepack.running.programs.learned import forget_learned as forget_learned
    from moepack.running.programs.learned import learned_facts as learned_facts
    from moepack.running.programs.learned import learned_hotness as learned_hotness
    from moepack.running.serving.calls import run as run
    from moepack.running.serving.calls import serve as serve
    from moepack.running.serving.recording import record_trace as record_trace
    from moepack.running.serving.sampling import Sampling as Sampling
    from moepack.traces.analysis.concentration import concentration as concentration
    from moepack.traces.analysis.statistics import trace_statistics as trace_statistics
    from moepack.traces.formats.reading import import_trace as import_trace
    from moepack.traces.formats.reading import read_trace as read_trace
    from moepack.traces.formats.reading import shape_of as shape_of
    from moepack.traces.formats.registry import ReadOptions as ReadOptions
    from moepack.traces.formats.routing import Routing as Routing
    from moepack.traces.formats.routing import Token as Token
    from moepack.traces.formats.routing import Trace as Trace
    from moepack.traces.formats.routing import open_trace as open_trace
    from moepack.traces.hotness.measure import measure_hotness as measure_hotness
    from moepack.traces.simulation.simulate import simulate as simulate
    from moepack.version import __version__ as __version__

_NAMES = {
    "bench.diagnosis.doctor": "doctor",
    "bench.machine": "measure_machine",
    "bench.run": "bench_pack",
    "bench.tuning": "tune",
    "common.errors": (
        "MachineError MirrorWarning MoepackError PackError RequestError SourceError TraceError"
    ),
    "common.shape": "ExpertKey ModelShape",
    "inspection.describe": "inspect",
    "inspection.listing": "list_pack",
    "pack.engines.checking": "verify_export",
    "pack.engines.exporting": "export export_formats",
    "pack.mounting.mount": "mount",
    "pack.reading.batch": "Batch ExpertBytes",
    "pack.reading.in_flight": "Statistics",
    "pack.reading.locations": "BlobLocation ExpertHotness PartLocation TensorLocation",
    "pack.reading.pack": "Pack",
    "pack.reading.reader": "Reader",
    "pack.verifying.verifier": "verify",
    "packing.fetched": "fetch_model",
    "packing.copies.mirror": "mirror_pack remove_mirror",
    "packing.pack_model": "SharedPack pack_in_place pack_model",
    "packing.copies.pull": "pull",
    "packing.copies.repair": "repair",
    "packing.ranking": "rank_pack",
    "packing.restore": "restore",
    "packing.shard_index": "index_model",
    "planning.forecasting.comparison": "compare_machines",
    "planning.forecasting.forecast": "forecast",
    "planning.machine.described": "describe_machine presets",
    "planning.placing.place": "place",
    "report.html.report": "make_report",
    "running.expert_cache": "CacheContext CacheUsage ExpertCache",
    "running.serving.calls": "run serve",
    "running.programs.learned": "forget_learned learned_facts learned_hotness",
    "running.serving.sampling": "Sampling",
    "running.serving.recording": "record_trace",
    "traces.analysis.concentration": "concentration",
    "traces.analysis.statistics": "trace_statistics",
    "traces.formats.registry": "ReadOptions",
    "traces.formats.reading": "import_trace read_trace shape_of",
    "traces.formats.routing": "Routing Token Trace open_trace",
    "traces.hotness.measure": "measure_hotness",
    "traces.simulation.simulate": "simulate",
    "version": "__version__",
}
"""The public names by the module that they are loaded from."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULES, "open"])


if not TYPE_CHECKING:  # else any name would pass as one of ours

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module 'moepack' has no attribute {name!r}")
        # Not importlib, which opens a file: whoever catches "too many open files" may come here.
        module = __import__(f"moepack.{_MODULES[name]}", fromlist=[name])
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def open(path: "PathOrPaths") -> "Pack":
    """Open the pack in the directory `path`, or a GGUF.

    The manifest, the digest of the index and its tables are checked. A GGUF is named by any of its
    shards, its folder or a list of all shards; its index is made in memory, as `index_model` does
    without digests.

    Raises PackError if the pack is incomplete, damaged, or of a version that this reader does not
    support; SourceError for a broken GGUF; RequestError for anything but a path.
    """
    from moepack.pack.reading.directory import pack_path
    from moepack.pack.reading.pack import Pack

    folder = pack_path(path)
    if folder is not None:
        return Pack(folder)
    from moepack.pack.opening.open_model import open_shards  # here, since packs do without it

    return open_shards(path)
