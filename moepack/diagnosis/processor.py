"""Which processors compute, with which build of llama.cpp, and what GPUs there are."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from moepack.diagnosis.finding import Finding
from moepack.errors import MachineError
from moepack.llama_cpp import library
from moepack.machine.bandwidth import cpu_count
from moepack.machine.model import Figure, Gpu
from moepack.machine.units import compute_text
from moepack.sizes import count_text, size_text

_INFO = Path("/proc/cpuinfo")
_BUSY = 0.5
"""Of the processors: from so much work of others on, threads wait for each other."""
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx_vnni": "AVX_VNNI",
    "amx_int8": "AMX_INT8",
}
"""What /proc/cpuinfo calls what makes products of quantised matrices faster, and llama.cpp."""


def check_processors(compute: Figure | None, load: float, quota: float | None) -> Finding:
    """Judge how many processors there are for this process, and what they compute.

    `load` is how many are busy with something else, `quota` how many a control group allows.
    """
    count, all_of_them = cpu_count(), os.cpu_count() or 1
    measured = count_text(count, "thread")
    if compute is not None:
        measured += f", {compute_text(compute.value)} in products of matrices"
    if quota is not None and quota < count:
        measured += f"; a control group allows {quota:.1f} of them"
        hint = "give the container more (cpu.max), or use fewer threads"
        return Finding("processors", measured, "limit", hint)
    if count < all_of_them:
        measured += f"; the machine has {all_of_them}"
        return Finding("processors", measured, "limit", "let it use them all (taskset, cpuset)")
    if load > _BUSY * count:
        measured += f"; {load:.1f} are busy"
        hint = "other programs compute: end them, or use fewer threads"
        return Finding("processors", measured, "limit", hint)
    return Finding("processors", measured, "fine")


def check_build(
    system_info: str | None = None, processor: Collection[str] | None = None
) -> Finding:
    """Compare what the llama.cpp of `run` and `serve` was built for with this processor.

    `system_info` is what llama.cpp says of itself, `processor` the flags of /proc/cpuinfo.
    """
    name = "llama.cpp"
    if system_info is None:
        try:
            system_info = library.system_info()
        except MachineError as error:
            return Finding(name, str(error.problem), "unknown", error.hint)
    flags = _flags() if processor is None else processor
    built = {word for word, _, value in _pairs(system_info) if value == "1"}
    used = [feature for feature in _FEATURES.values() if feature in built]
    missing = [
        feature for flag, feature in _FEATURES.items() if flag in flags and feature not in built
    ]
    version = f"{library.PACKAGE} {library.VERSION}"
    measured = f"{version}, built for {', '.join(used) or 'any processor'}"
    if not flags:
        return Finding(name, measured, "unknown")
    if not missing:
        return Finding(name, measured, "fine")
    hint = (
        "a build of llama.cpp for this processor computes prompts up to twice as fast: "
        "`moepack run MODEL -- llama-server -m {}`"
    )
    return Finding(name, f"{measured}; this one has {', '.join(missing)}", "limit", hint)


def check_gpus(gpus: Collection[Gpu], notes: Collection[str]) -> Finding:
    """Name the GPUs that a program of llama.cpp could use; `notes` say why none was found."""
    if not gpus:
        reason = next((note for note in notes if "GPU" in note), None)
        return Finding("GPU", None, "unknown", reason)
    words = [f"{gpu.name or 'a GPU'}, {size_text(int(gpu.memory.value))}" for gpu in gpus]
    hint = "`run` and `serve` compute on processors: `moepack place` says how to use it"
    return Finding("GPU", "; ".join(words), "fine", hint)


def _flags() -> set[str]:
    try:
        lines = _INFO.read_text().splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(flags.partition(":")[2].split())


def _pairs(system_info: str) -> list[tuple[str, str, str]]:
    """Return `NAME = VALUE`, as llama.cpp writes it between bars."""
    parts = (part.rpartition(":")[2].partition("=") for part in system_info.split("|"))
    return [(name.strip(), sign, value.strip()) for name, sign, value in parts]
