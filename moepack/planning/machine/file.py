"""machine.toml: the figures of a machine, measured once, completed by hand, and kept.

A figure is a text with its unit, which somebody typed, or a table that also names its basis.
Unknown figures are left out. Units are exact both ways: text that was written is read as the same
number.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple, get_args

from moepack.common.errors import RequestError, read_failure
from moepack.common.escaping import one_line
from moepack.common.fields import Fields, parse_toml
from moepack.common.sizes import unit_length
from moepack.planning.machine.model import Basis, Drive, Figure, Gpu, Machine, ReadSpeed

MAX_FILE_LENGTH = 1 << 18
MAX_DEPTH = 4096
_MAX_TEXT = 4096

_LENGTHS = {unit: 1024**n for n, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}
_MAKERS_SPEEDS = {f"{unit}/s": 1000**n for n, unit in enumerate(("B", "KB", "MB", "GB", "TB"))}
"""Of speeds a GB is 10⁹ bytes, as drives and memory are sold; of lengths it is a GiB."""
_SPEEDS = {f"{unit}/s": factor for unit, factor in _LENGTHS.items()} | _MAKERS_SPEEDS
_COMPUTES = {f"{prefix}FLOP/s": 1000**n for n, prefix in enumerate("GTP", 3)}
_NUMBER_AND_UNIT = re.compile(r"(\d{1,25}(?:\.\d{1,25})?) ?([A-Za-z]{1,5}(?:/s)?)\Z", re.ASCII)

_BASES = get_args(Basis)
_BY_TRANSFERS = "channels × 8 bytes × MT/s: two channels of 6400 MT/s are 102.4 GB/s"


def length_text(length: float) -> str:
    """Write bytes without rounding, in the largest unit of which they are whole quarters."""
    whole = (unit for unit, one in _LENGTHS.items() if one <= length and not 4 * length % one)
    unit = max(whole, key=lambda unit: _LENGTHS[unit], default="B")
    return f"{_plain(Decimal(repr(length)) / _LENGTHS[unit])} {unit}"


def speed_text(speed: float) -> str:
    """Write bytes a second without rounding, as makers have them."""
    return _in_largest_unit(speed, _MAKERS_SPEEDS)


def compute_text(speed: float) -> str:
    """Write floating-point operations a second without rounding."""
    return _in_largest_unit(speed, _COMPUTES)


def _in_largest_unit(value: float, units: dict[str, int]) -> str:
    unit = next((one for one in reversed(units) if value >= units[one]), "GFLOP/s")
    return f"{_plain(Decimal(repr(value)) / units[unit])} {unit}"


def _plain(number: Decimal) -> str:
    return f"{number.normalize():f}"


class _Quantity(NamedTuple):
    """A quantity between two bounds; `unit` returns the worth of a unit, None for another."""

    noun: str
    unit: Callable[[str], int | None]
    units: str
    text: Callable[[float], str]
    least: int
    most: int
    example: str


_LENGTH = _Quantity(
    "length", unit_length, "MB, GB, MiB, GiB …", length_text, 1 << 20, 1 << 60, "24 GiB"
)
_READ_LENGTH = _LENGTH._replace(least=1 << 9, most=1 << 40)
_BANDWIDTH = _Quantity(
    "bandwidth", _SPEEDS.get, "MB/s, GB/s, MiB/s, GiB/s …", speed_text, 10**6, 10**15, "31.5 GB/s"
)
_DRIVE_BANDWIDTH = _BANDWIDTH._replace(least=1, example="7 GB/s")
"""Short reads of a drive that others keep busy may take a second."""
_COMPUTE = _Quantity(
    "speed of computing",
    _COMPUTES.get,
    "GFLOP/s, TFLOP/s or PFLOP/s",
    compute_text,
    10**6,
    10**18,
    "245 GFLOP/s",
)


def parse_bandwidth(text: str, argument: str) -> Figure:
    """Read a bandwidth, as files have it. Raises RequestError, which names the argument."""
    table = _MachineTable("", "", {"": text}, ("",))
    try:
        return Figure(table.quantity("", _DRIVE_BANDWIDTH), "typed")
    except RequestError as error:
        error.path, error.place, error.argument = None, None, argument
        raise


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine.toml. Raises RequestError for faults in it, and if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_LENGTH + 1)
    except OSError as error:
        raise read_failure(error, path, RequestError) from None
    return decode(data, os.fspath(path))


def decode(data: bytes, path: str) -> Machine:
    """Read the bytes of a machine.toml; `path` is for messages. Raises RequestError."""
    keys = ("name", "memory", "processor", "gpus", "drive")
    return _machine(_MachineTable(path, "", parse_toml(data, path, MAX_FILE_LENGTH), keys))


class _MachineTable(Fields):
    """A table of the file, at a `place`, which has no other `keys`."""

    def __init__(self, path: str, place: str, body: object, keys: tuple[str, ...]) -> None:
        if not isinstance(body, dict):
            raise RequestError(
                "not a table", path=path, place=place, expected=", ".join(keys), found=body
            )
        super().__init__(body, place, path, RequestError)
        self.allow(*keys)

    def table(self, key: str, keys: tuple[str, ...]) -> "_MachineTable":
        return _MachineTable(self.path, self.at(key), self.body.get(key, {}), keys)

    def tables(self, key: str, keys: tuple[str, ...]) -> Iterator["_MachineTable"]:
        bodies = self.body.get(key, [])
        if not isinstance(bodies, list):
            self.fail(key, "not a list of tables", f"[[{self.at(key)}]]")
        for number, body in enumerate(bodies):
            yield _MachineTable(self.path, f"{self.at(key)}[{number}]", body, keys)

    def required(self, key: str, quantity: _Quantity) -> Figure:
        figure = self.figure(key, quantity)
        if figure is None:
            self.fail(key, "missing", f'such as "{quantity.example}"')
        return figure

    def figure(self, key: str, quantity: _Quantity) -> Figure | None:
        if self.body.get(key) is None:
            return None
        if not isinstance(self.body[key], dict):
            return Figure(self.quantity(key, quantity), "typed")
        table = self.table(key, ("value", "is", "lowest", "highest"))
        if "value" not in table:
            table.fail("value", "missing")
        basis: Any = table.choice("is", _BASES, "typed")
        value = table.quantity("value", quantity)
        lowest, highest = (
            table.quantity(end, quantity) if end in table else None for end in ("lowest", "highest")
        )
        middle = quantity.text(value)
        if lowest is not None and lowest > value:
            table.fail("lowest", "above the value", f"up to {middle}", quantity.text(lowest))
        if highest is not None and highest < value:
            expected = f"at least {middle}"
            table.fail("highest", "below the value", expected, quantity.text(highest))
        return Figure(value, basis, lowest, highest)

    def quantity(self, key: str, quantity: _Quantity) -> float:
        """Return a quantity in bytes, bytes a second or operations a second."""
        value, noun, example = self.body[key], quantity.noun, f'such as "{quantity.example}"'
        if not isinstance(value, str):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            problem = "a number without a unit" if is_number else f"not a {noun}"
            self.fail(key, problem, example, value)
        match = _NUMBER_AND_UNIT.match(value)
        if match is None:
            self.fail(key, f"not a {noun}", example, repr(value))
        factor = quantity.unit(match[2])
        if factor is None:
            hint = _BY_TRANSFERS if match[2] in ("MT/s", "GT/s") else None
            self.fail(key, "unknown unit", quantity.units, value, hint)
        number = float(Decimal(match[1]) * factor)
        if not quantity.least <= number <= quantity.most:
            hint = None if number else "leave out unknown figures"
            expected = f"{quantity.text(quantity.least)} to {quantity.text(quantity.most)}"
            self.fail(key, f"not a possible {noun}", expected, value, hint)
        return number


def _machine(body: _MachineTable) -> Machine:
    if "memory" not in body:
        body.fail("memory", "missing", "[memory] with a length")
    memory = body.table("memory", ("length", "bandwidth"))
    machine = Machine(
        name=body.line("name", _MAX_TEXT),
        memory=memory.required("length", _LENGTH),
        memory_bandwidth=memory.figure("bandwidth", _BANDWIDTH),
        drive=_drive(body) if "drive" in body else None,
        compute=body.table("processor", ("compute",)).figure("compute", _COMPUTE),
    )
    keys = ("name", "unified", "length", "bandwidth", "link", "compute")
    gpus = tuple(_gpu(gpu, machine) for gpu in body.tables("gpus", keys))
    if len(gpus) > 1 and any(gpu.is_unified for gpu in gpus):
        body.fail("gpus", "a GPU beside one of unified memory", "unified memory has one GPU")
    return machine._replace(gpus=gpus)


def _gpu(gpu: _MachineTable, machine: Machine) -> Gpu:
    """Read a GPU.

    If the file does not say otherwise, it may use all of unified memory, and reads it as fast as
    the CPUs do.
    """
    is_unified = gpu.optional("unified", bool) or False
    length = gpu.figure("length", _LENGTH) if is_unified else gpu.required("length", _LENGTH)
    bandwidth = gpu.figure("bandwidth", _BANDWIDTH)
    if is_unified:
        bandwidth = bandwidth or machine.memory_bandwidth
        if length is not None and length.value > machine.memory.value:
            most, more = length_text(machine.memory.value), length_text(length.value)
            gpu.fail("length", "more than the memory", f"up to {most}", more)
    return Gpu(
        gpu.line("name", _MAX_TEXT),
        length or machine.memory,
        bandwidth,
        gpu.figure("link", _BANDWIDTH),
        gpu.figure("compute", _COMPUTE),
        is_unified,
    )


def _drive(body: _MachineTable) -> Drive:
    drive = body.table("drive", ("path", "bandwidth", "sequential", "reads"))
    reads: dict[tuple[int, int], ReadSpeed] = {}
    for table in drive.tables("reads", ("length", "depth", "bandwidth")):
        if "length" not in table:
            table.fail("length", "missing")
        length, depth = round(table.quantity("length", _READ_LENGTH)), table.body.get("depth")
        if type(depth) is not int or not 1 <= depth <= MAX_DEPTH:
            expected = f"a number of reads in flight, 1 to {MAX_DEPTH:,}"
            table.fail("depth", "missing, or not a depth", expected, depth)
        if (length, depth) in reads:
            repeated = f"{length_text(length)}, depth {depth}"
            table.fail("", "a second time", "each length and depth once", repeated)
        speed = table.required("bandwidth", _DRIVE_BANDWIDTH)
        reads[length, depth] = ReadSpeed(length, depth, speed)
    bandwidth = drive.figure("bandwidth", _DRIVE_BANDWIDTH)
    if bandwidth is None and not reads:
        expected = "a bandwidth, or [[drive.reads]]"
        hint = "leave [drive] out if neither is known"
        drive.fail("", "it says nothing about speed", expected, hint=hint)
    sequential = drive.figure("sequential", _DRIVE_BANDWIDTH)
    return Drive(drive.line("path", _MAX_TEXT), bandwidth, tuple(reads.values()), sequential)


_HEADING = """\
# A machine, as moepack knows it. Each figure names its basis: measured, or read from the kernel
# or a driver; a figure that you type is a text alone, such as bandwidth = "936 GB/s".
# Leave out unknown figures. Lengths: MiB, GiB, MB, GB …; bandwidths: MiB/s, GiB/s, and
# MB/s, GB/s as makers have them."""
_NO_GPU = """
# For each GPU:
# [[gpus]]
# name = "…"
# length = "24 GiB"
# bandwidth = "936 GB/s"
# link = "31.5 GB/s"  # from memory: 31.5 GB/s is PCIe 4.0 with 16 lanes
# compute = "71 TFLOP/s"
# unified = true  # in place of length and bandwidth: it has no memory of its own\
"""
_NO_DRIVE = """
# [drive]
# bandwidth = "7 GB/s\""""


def toml_text(machine: Machine) -> str:
    """Return a machine as the text of a machine.toml, which `read_machine` reads as the same."""
    return "\n".join(_lines(machine)) + "\n"


def _lines(machine: Machine) -> Iterator[str]:
    yield _HEADING
    yield from _name("name", machine.name)
    yield from ("", "[memory]", *_figure("length", machine.memory, length_text))
    if machine.memory_bandwidth is None:
        yield f'# bandwidth = "51.2 GB/s"  # {_BY_TRANSFERS}'
    yield from _figure("bandwidth", machine.memory_bandwidth, speed_text)
    if machine.compute is not None:
        yield from ("", "[processor]", *_figure("compute", machine.compute, compute_text))
    for gpu in machine.gpus:
        yield from ("", "[[gpus]]", *_name("name", gpu.name))
        yield from ["unified = true"] if gpu.is_unified else []
        yield from _figure("length", gpu.memory, length_text)
        yield from _figure("bandwidth", gpu.bandwidth, speed_text)
        yield from _figure("link", gpu.link, speed_text)
        yield from _figure("compute", gpu.compute, compute_text)
    if not machine.gpus:
        yield _NO_GPU
    drive = machine.drive
    if drive is None:
        yield _NO_DRIVE
        return
    yield from ("", "[drive]", *_name("path", drive.path))
    yield from _figure("bandwidth", drive.bandwidth, speed_text)
    yield from _figure("sequential", drive.sequential, speed_text)
    for length, depth, bandwidth in drive.reads:
        yield from ("", "[[drive.reads]]", f'length = "{length_text(length)}"', f"depth = {depth}")
        yield from _figure("bandwidth", bandwidth, speed_text)


def _name(key: str, text: str | None) -> Iterator[str]:
    if text is not None:
        yield f"{key} = {json.dumps(one_line(text), ensure_ascii=False)}"


def _figure(key: str, figure: Figure | None, text: Callable[[float], str]) -> Iterator[str]:
    if figure is None:
        return
    value = f'"{text(figure.value)}"'
    ends = {"lowest": figure.lowest, "highest": figure.highest}
    spread = "".join(
        f', {end} = "{text(limit)}"' for end, limit in ends.items() if limit is not None
    )
    if figure.basis == "typed" and not spread:
        yield f"{key} = {value}"
    else:
        yield f'{key} = {{ value = {value}, is = "{figure.basis}"{spread} }}'
