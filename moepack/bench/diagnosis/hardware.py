"""Checks of memory, processors, GPUs, variables and the drive."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from moepack.bench.diagnosis.system import CheckResult, Verdict, judged
from moepack.common import extras
from moepack.common.errors import MachineError
from moepack.common.sizes import count_text, size_text, speed_text
from moepack.host.memory_limits import (
    MOST_STALLED,
    PRESSURE,
    available_memory,
    limited_memory,
    stalled_percent,
    system_memory,
)
from moepack.host.processors import cpu_count
from moepack.planning.machine.file import compute_text
from moepack.planning.machine.model import STEADY, Drive, Figure, Gpu
from moepack.running.programs.command import find_reading_option

_MIN_FREE_SHARE = 0.25
"""The share of all memory below which something else takes the rest."""
_NODES = Path("/sys/devices/system/node")
_CPU_INFO = Path("/proc/cpuinfo")
_LIBRARY = "xllamacpp/xllamacpp.abi3.so"
_BUSY_SHARE = 0.5
"""The share of processors that others may use before threads wait for each other."""
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx_vnni": "AVX_VNNI",
    "amx_int8": "AMX_INT8",
}
"""llama.cpp's names of features that speed up matrix products, by their flag in /proc/cpuinfo."""
_DRIVE_DEPTH = 4
_SLOW_DRIVE = 0.5e9
"""Bytes a second below which a token of most models takes seconds."""
_MIN_RANDOM_SHARE = 0.6
"""The share of the sequential speed that random reads should reach."""


def check_free_memory() -> CheckResult:
    """Compare the memory for this process with all memory of the machine."""
    total, limit, available = system_memory(), limited_memory(), available_memory()
    most = total if limit is None else min(total, limit)
    measured, hint = f"{size_text(available)} may be taken of {size_text(total)}", None
    if limit is not None and limit < total:
        measured += f"; a control group allows {size_text(limit)}"
        hint = "give the container or service more (memory.max)"
    elif available < _MIN_FREE_SHARE * most:
        hint = "end programs that use the rest: experts in memory are not read again"
    return judged("memory", measured, hint)


def check_pressure(path: Path = PRESSURE) -> CheckResult:
    """Check whether anything waited for memory in the last ten seconds (PSI)."""
    percent = stalled_percent(path)
    if percent is None:
        return CheckResult("memory pressure", None, "unknown")
    measured = f"something waited for memory in {percent:.0f} % of the last ten seconds"
    hint = None
    if percent > MOST_STALLED:  # then `run` gives memory back
        hint = (
            "other programs are using memory: end them, or give the model less: "
            "`moepack run MODEL --memory SIZE`"
        )
    return judged("memory pressure", measured, hint)


def check_bandwidth(bandwidth: Figure | None, nodes: Path = _NODES) -> CheckResult:
    """Judge the memory bandwidth of all processors together."""
    name, hint = "memory bandwidth", None
    if bandwidth is None:
        return CheckResult(name, None, "unknown", "too little memory is free to measure it")
    measured = speed_text(bandwidth.value)
    node_count = len(list(nodes.glob("node[0-9]*")))
    if (bandwidth.spread or 1.0) > STEADY:
        measured += (
            f" ({speed_text(bandwidth.lowest or 0)} to {speed_text(bandwidth.highest or 0)})"
        )
        hint = "other programs use the memory as well: tokens take longer meanwhile"
    elif node_count > 1:
        measured += f", of {node_count} nodes together"
        hint = "start with `numactl --interleave=all`, so that all nodes are used"
    return judged(name, measured, hint)


def check_processors(
    compute: Figure | None, busy: float | None, quota: float | None
) -> CheckResult:
    """Judge the number of processors for this process, and their speed.

    `busy` is how many of them work for others, None if unknown; `quota` the number that a control
    group allows.
    """
    count, all_of_them = cpu_count(), os.cpu_count() or 1
    measured, hint = count_text(count, "thread"), None
    if compute is not None:
        measured += f", {compute_text(compute.value)} in products of matrices"
    if quota is not None and quota < count:
        measured += f"; a control group allows {quota:.1f} of them"
        hint = "give the container more (cpu.max), or use fewer threads"
    elif count < all_of_them:
        measured += f"; the machine has {all_of_them}"
        hint = "allow it to use all of them (taskset, cpuset)"
    elif busy is not None and busy > _BUSY_SHARE * count:
        measured += f"; {busy:.1f} are busy"
        hint = "other programs compute: end them, or use fewer threads"
    return judged("processors", measured, hint)


def check_build(
    system_info: str | None = None, processor: Collection[str] | None = None
) -> CheckResult:
    """Compare the build of llama.cpp for `run` and `serve` with this processor.

    `system_info` is llama.cpp's own, `processor` the flags of /proc/cpuinfo.
    """
    name = "llama.cpp"
    if system_info is None:
        try:
            system_info = _system_info()
        except MachineError as error:
            return CheckResult(name, str(error.problem), "unknown", error.hint)
    flags = _flags() if processor is None else processor
    # As llama.cpp writes it: `CPU : NAME = VALUE | NAME = VALUE`.
    pairs = (part.rpartition(":")[2].partition("=") for part in system_info.split("|"))
    built = {word.strip() for word, _, value in pairs if value.strip() == "1"}
    used = [feature for feature in _FEATURES.values() if feature in built]
    missing = [
        feature for flag, feature in _FEATURES.items() if flag in flags and feature not in built
    ]
    version = " ".join(extras.LLAMA_CPP)
    measured = f"{version}, built for {', '.join(used) or 'any processor'}"
    if not flags:
        return CheckResult(name, measured, "unknown")
    if not missing:
        return CheckResult(name, measured, "fine")
    hint = (
        "a build of llama.cpp for this processor computes prompts up to twice as fast: "
        "`moepack run MODEL -- llama-server -m {}`"
    )
    return CheckResult(name, f"{measured}; this one has {', '.join(missing)}", "limit", hint)


def _system_info() -> str:
    """Return the features that llama.cpp was built with. Raises MachineError if it is missing."""
    extras.require("run")
    package, _ = extras.LLAMA_CPP
    path = str(metadata.distribution(package).locate_file(_LIBRARY))
    try:
        function = ctypes.CDLL(path).llama_print_system_info
    except (OSError, AttributeError) as error:
        # It links to GNU's OpenMP, which slim containers leave out.
        hint = "apt-get install libgomp1" if "libgomp" in str(error) else extras.hint("run")
        raise MachineError(f"cannot be loaded: {error}", path=path, hint=hint) from None
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode(errors="replace")


def check_gpus(gpus: Collection[Gpu], note: str | None) -> CheckResult:
    """Name the GPUs that a program of llama.cpp could use; `note` says why none was found."""
    if not gpus:
        return CheckResult("GPU", None, "unknown", note)
    words = [f"{gpu.name or 'a GPU'}, {size_text(int(gpu.memory.value))}" for gpu in gpus]
    hint = "`run` and `serve` compute on processors: `moepack place` says how to use it"
    return CheckResult("GPU", "; ".join(words), "fine", hint)


def _flags() -> set[str]:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(flags.partition(":")[2].split())


def check_variables(environment: Mapping[str, str]) -> CheckResult:
    """Look for variables that keep a program from loading experts, or slow it down."""
    for measured, verdict, hint in _variables(environment):
        return CheckResult("variables", measured, verdict, hint)
    return CheckResult("variables", "none interferes", "fine")


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, Verdict, str]]:
    reading = find_reading_option([], environment)
    if reading is not None:
        yield reading, "problem", "unset it: the program would read or lock the whole model"
    if environment.get("GGML_CUDA_REGISTER_HOST"):
        hint = "unset it: it pins pages that moepack replaces"
        yield "GGML_CUDA_REGISTER_HOST is set", "problem", hint
    if environment.get("OMP_WAIT_POLICY", "").lower() == "active":
        hint = "unset it: spinning threads take processors from those that read experts"
        yield "OMP_WAIT_POLICY=active", "limit", hint
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and 0 < int(threads) < cpu_count():
        yield f"OMP_NUM_THREADS={threads}", "limit", f"unset it: there are {cpu_count()} processors"


def check_drive(drive: Drive | None, note: str | None) -> CheckResult:
    """Judge random reads as long as experts; `note` says why there are none."""
    if drive is None or not drive.reads:
        return CheckResult("drive", None, "unknown", note)
    length = max(read.length for read in drive.reads)
    speed = drive.speed(length, _DRIVE_DEPTH)
    measured, hint = f"{speed_text(speed.value)} in random reads of {size_text(length)}", None
    if drive.sequential is not None:
        measured += f", {speed_text(drive.sequential.value)} in order"
    if (speed.spread or 1.0) > STEADY:
        hint = "the drive is shared, throttled or hot: it was much faster a moment ago"
    elif speed.value < _SLOW_DRIVE:
        hint = "move the model to a faster drive (NVMe)"
    elif drive.sequential is not None and speed.value < _MIN_RANDOM_SHARE * drive.sequential.value:
        hint = "longer reads help: a pack has one read for an expert; `moepack bench` measures it"
    return judged("drive", measured, hint)
