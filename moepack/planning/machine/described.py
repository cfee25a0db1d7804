"""A machine by its file, by the name of one that is sold, or by figures that are typed.

The presets are files beside this module, with the source of each figure. Figures that are typed
replace those of a file or a preset.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath
from moepack.common.sizes import Size, as_list, parse_size, size_text
from moepack.planning.machine.file import parse_bandwidth, read_machine
from moepack.planning.machine.model import Drive, Figure, Gpu, Machine

PRESET = "preset:"
_PRESETS = Path(__file__).with_name("presets")

AnyMachine = Machine | AnyPath
"""A machine, the path of its file, or `preset:NAME`."""


class Preset(NamedTuple):
    """A machine that is sold, by its name."""

    name: str
    machine: Machine


class Presets(NamedTuple):
    """All machines that are sold, and known here."""

    presets: tuple[Preset, ...]


def presets() -> Presets:
    """Return all presets."""
    return Presets(tuple(Preset(name, find_machine(PRESET + name)) for name in preset_names()))


def preset_names() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def find_machine(machine: AnyMachine) -> Machine:
    """Return a machine by its file or its preset. Raises RequestError if there is none."""
    if isinstance(machine, Machine):
        return machine
    text, names = str(machine), preset_names()
    if not text.startswith(PRESET):
        if text in names and not Path(text).exists():
            hint = f"did you mean {PRESET}{text}?"
            raise RequestError("no such file", path=text, hint=hint)
        return read_machine(machine)
    name = text.removeprefix(PRESET)
    if name not in names:
        near = get_close_matches(name, names, 1)
        raise RequestError(
            "no such preset",
            expected=", ".join(names),
            found=repr(name),
            hint=f"did you mean {PRESET}{near[0]}?" if near else None,
        )
    return read_machine(_PRESETS / f"{name}.toml")


def describe_machine(
    machine: AnyMachine | None = None,
    *,
    memory: Size | None = None,
    vram: Size | Sequence[Size] = (),
    memory_bandwidth: str | None = None,
    vram_bandwidth: str | None = None,
    drive_speed: str | None = None,
) -> Machine:
    """Return a machine, with figures in place of its own, or one of these figures alone.

    `machine` is one, the path of its file, or `preset:NAME`. `vram` is bytes of each GPU,
    `vram_bandwidth` that of all of them. Bandwidths are texts such as `89.6 GB/s`. Raises
    RequestError for an invalid figure, and if the amount of memory is unknown.
    """
    length = None if memory is None else Figure(parse_size(memory, "memory"), "typed")
    if machine is not None:
        box = _with_memory(find_machine(machine), length)
    elif length is not None:
        box = Machine(None, length, None)
    else:
        hint = "`machine` says it, or `memory` and `vram` do"
        raise RequestError("the amount of memory is unknown", hint=hint)
    lengths = [Figure(parse_size(one, "vram"), "typed") for one in as_list(vram)]
    if box.is_unified and len(lengths) > 1:
        problem = "unified memory has one GPU"
        raise RequestError(problem, argument="vram", expected="one size", found=len(lengths))
    if box.is_unified and lengths and lengths[0].value > box.memory.value:
        most, more = (size_text(int(one.value)) for one in (box.memory, lengths[0]))
        raise RequestError(
            "more than the memory", argument="vram", expected=f"up to {most}", found=more
        )
    unknown = (Gpu(None, box.memory, None),) * max(0, len(lengths) - len(box.gpus))
    gpus = [*box.gpus, *unknown]
    gpus[: len(lengths)] = [
        gpu._replace(memory=one) for gpu, one in zip(gpus, lengths, strict=False)
    ]
    if vram_bandwidth is not None:
        speed = parse_bandwidth(vram_bandwidth, "vram_bandwidth")
        gpus = [gpu._replace(bandwidth=speed) for gpu in gpus]
    box = box._replace(gpus=tuple(gpus))
    if memory_bandwidth is not None:
        box = box._replace(memory_bandwidth=parse_bandwidth(memory_bandwidth, "memory_bandwidth"))
    if drive_speed is not None:
        box = box._replace(drive=Drive(None, parse_bandwidth(drive_speed, "drive_speed")))
    return box


def _with_memory(machine: Machine, memory: Figure | None) -> Machine:
    """Return a machine with other memory, of which a unified GPU may use the same share."""
    if memory is None:
        return machine
    times = memory.value / machine.memory.value
    gpus = [
        gpu._replace(memory=memory._replace(value=times * gpu.memory.value))
        if gpu.is_unified
        else gpu
        for gpu in machine.gpus
    ]
    return machine._replace(memory=memory, gpus=tuple(gpus))
