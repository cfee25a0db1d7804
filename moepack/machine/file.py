"""machine.toml: what is known of a machine, to be measured once, completed by hand, and kept.

A figure is a text with its unit, which somebody typed, or a table that says where it comes from.
What is not known is left out.
"""

import json
import os
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, get_args

from moepack.errors import RequestError, read_failure
from moepack.escaping import one_line
from moepack.machine.model import Basis, Drive, Figure, Gpu, Machine, ReadSpeed
from moepack.machine.units import Amount, compute_text, length_text, parse_amount, speed_text
from moepack.sizes import size_text

MAX_FILE_LENGTH = 1 << 18
MAX_DEPTH = 4096
_MAX_TEXT = 4096

_BASES = get_args(Basis)
_BY_TRANSFERS = "channels × 8 bytes × MT/s: two channels of 6400 MT/s are 102.4 GB/s"


class _Kind(NamedTuple):
    """What a figure may be: a `noun`, in bytes of a second or not, between two bounds.

    `is_compute` says that it is operations a second instead.
    """

    noun: str
    is_speed: bool
    least: int
    most: int
    example: str
    is_compute: bool = False

    def text(self, value: float) -> str:
        if self.is_compute:
            return compute_text(value)
        return speed_text(value) if self.is_speed else length_text(value)


_LENGTH = _Kind("length", False, 1 << 20, 1 << 60, "24 GiB")
_READ_LENGTH = _Kind("length", False, 1 << 9, 1 << 40, "2 MiB")
_BANDWIDTH = _Kind("bandwidth", True, 10**6, 10**15, "31.5 GB/s")
_DRIVE_BANDWIDTH = _Kind("bandwidth", True, 1, 10**15, "7 GB/s")
"""Short reads of a drive that others keep busy may take a second."""


_COMPUTE = _Kind("speed of computing", True, 10**6, 10**18, "245 GFLOP/s", is_compute=True)


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine.toml. Raises RequestError for what is wrong in it or cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_LENGTH + 1)
    except OSError as error:
        raise read_failure(error, path, RequestError) from None
    return decode(data, os.fspath(path))


def decode(data: bytes, path: str) -> Machine:
    """Read the bytes of a machine.toml; `path` is for messages. Raises RequestError."""
    return _MachineDecoder(path).decode(data)


class _MachineDecoder:
    def __init__(self, path: str) -> None:
        self.path = path

    def decode(self, data: bytes) -> Machine:
        if len(data) > MAX_FILE_LENGTH:
            self.fail("", "too long for a machine's file", f"up to {size_text(MAX_FILE_LENGTH)}")
        try:
            body = tomllib.loads(data.decode())
        except (ValueError, RecursionError) as error:
            self.fail("", f"not TOML ({str(error)[:80]})")
        self.known(body, "", ("name", "memory", "processor", "gpus", "drive"))
        if "memory" not in body:
            self.fail("memory", "missing", "[memory] with a length")
        memory = self.table(body["memory"], "memory", ("length", "bandwidth"))
        processor = self.table(body.get("processor", {}), "processor", ("compute",))
        return Machine(
            name=self.text(body, "name"),
            memory=self.required(memory, "memory.length", _LENGTH),
            memory_bandwidth=self.figure(memory, "memory.bandwidth", _BANDWIDTH),
            gpus=tuple(
                self.gpu(gpu, place) for gpu, place in self.tables(body, "gpus", "[[gpus]]")
            ),
            drive=self.drive(body["drive"]) if "drive" in body else None,
            compute=self.figure(processor, "processor.compute", _COMPUTE),
        )

    def gpu(self, value: object, place: str) -> Gpu:
        gpu = self.table(value, place, ("name", "length", "bandwidth", "link", "compute"))
        return Gpu(
            self.text(gpu, f"{place}.name"),
            self.required(gpu, f"{place}.length", _LENGTH),
            self.figure(gpu, f"{place}.bandwidth", _BANDWIDTH),
            self.figure(gpu, f"{place}.link", _BANDWIDTH),
            self.figure(gpu, f"{place}.compute", _COMPUTE),
        )

    def drive(self, value: object) -> Drive:
        drive = self.table(value, "drive", ("path", "bandwidth", "sequential", "reads"))
        reads: dict[tuple[int, int], ReadSpeed] = {}
        for table, place in self.tables(drive, "drive.reads", "[[drive.reads]]"):
            read = self.read(table, place)
            if (read.length, read.depth) in reads:
                found = f"{length_text(read.length)}, depth {read.depth}"
                self.fail(place, "a second time", "each length and depth once", found)
            reads[read.length, read.depth] = read
        bandwidth = self.figure(drive, "drive.bandwidth", _DRIVE_BANDWIDTH)
        if bandwidth is None and not reads:
            expected = "a bandwidth, or [[drive.reads]]"
            hint = "leave [drive] out where neither is known"
            self.fail("drive", "it says nothing about speed", expected, hint=hint)
        sequential = self.figure(drive, "drive.sequential", _DRIVE_BANDWIDTH)
        path = self.text(drive, "drive.path")
        return Drive(path, bandwidth, tuple(reads.values()), sequential)

    def read(self, value: object, place: str) -> ReadSpeed:
        read = self.table(value, place, ("length", "depth", "bandwidth"))
        if "length" not in read:
            self.fail(f"{place}.length", "missing")
        length = self.amount(read["length"], f"{place}.length", _READ_LENGTH)
        depth = read.get("depth")
        if type(depth) is not int or not 1 <= depth <= MAX_DEPTH:
            expected = f"a number of reads in flight, 1 to {MAX_DEPTH:,}"
            self.fail(f"{place}.depth", "missing, or not a depth", expected, depth)
        bandwidth = self.required(read, f"{place}.bandwidth", _DRIVE_BANDWIDTH)
        return ReadSpeed(round(length), depth, bandwidth)

    def required(self, table: dict[str, Any], place: str, kind: _Kind) -> Figure:
        figure = self.figure(table, place, kind)
        if figure is None:
            self.fail(place, "missing", f'such as "{kind.example}"')
        return figure

    def figure(self, table: dict[str, Any], place: str, kind: _Kind) -> Figure | None:
        """Read a figure; None where there is none."""
        value = table.get(place.rpartition(".")[2])
        if value is None:
            return None
        if not isinstance(value, dict):
            return Figure(self.amount(value, place, kind), "typed")
        self.known(value, f"{place}.", ("value", "is", "lowest", "highest"))
        if "value" not in value:
            self.fail(f"{place}.value", "missing")
        basis = value.get("is", "typed")
        if basis not in _BASES:
            self.fail(f"{place}.is", "unknown value", " or ".join(_BASES), basis)
        middle, lowest, highest = (
            self.amount(value[key], f"{place}.{key}", kind) if key in value else None
            for key in ("value", "lowest", "highest")
        )
        assert middle is not None
        if lowest is not None and lowest > middle:
            expected = f"up to {kind.text(middle)}"
            self.fail(f"{place}.lowest", "above the value", expected, kind.text(lowest))
        if highest is not None and highest < middle:
            expected = f"at least {kind.text(middle)}"
            self.fail(f"{place}.highest", "below the value", expected, kind.text(highest))
        return Figure(middle, basis, lowest, highest)

    def amount(self, value: object, place: str, kind: _Kind) -> float:
        """Read bytes, or bytes a second, as `kind` says."""
        example = f'such as "{kind.example}"'
        if not isinstance(value, str):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            problem = "a number without a unit" if is_number else f"not a {kind.noun}"
            self.fail(place, problem, example, value)
        amount = parse_amount(value)
        if amount is None:
            self.fail(place, f"not a {kind.noun}", example, repr(value))
        found = self.bytes_of(amount, place, kind, value)
        if not kind.least <= found <= kind.most:
            hint = None if found else "leave out what is not known"
            expected = f"{kind.text(kind.least)} to {kind.text(kind.most)}"
            self.fail(place, f"not a possible {kind.noun}", expected, value, hint)
        return found

    def bytes_of(self, amount: Amount, place: str, kind: _Kind, written: str) -> float:
        if kind.is_compute:
            if amount.flops is None:
                self.fail(place, "unknown unit", "GFLOP/s, TFLOP/s or PFLOP/s", written)
            return amount.flops
        if amount.unit in ("MT/s", "GT/s"):
            self.fail(place, "transfers, not bytes", f'"{kind.example}"', written, _BY_TRANSFERS)
        if amount.bytes is None:
            suffix = "/s" if kind.is_speed else ""
            expected = ", ".join(f"{unit}{suffix}" for unit in ("MB", "GB", "MiB", "GiB")) + " …"
            self.fail(place, "unknown unit", expected, written)
        if amount.is_speed != kind.is_speed:
            problem = "a length, not a bandwidth" if kind.is_speed else "a bandwidth, not a length"
            hint = "bandwidths end in /s, lengths do not"
            self.fail(place, problem, f'such as "{kind.example}"', written, hint)
        return amount.bytes

    def text(self, table: dict[str, Any], place: str) -> str | None:
        value = table.get(place.rpartition(".")[2])
        if value is None:
            return None
        if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_TEXT:
            self.fail(place, "not a line of text", found=value)
        return value

    def tables(self, table: dict[str, Any], place: str, form: str) -> Iterator[tuple[object, str]]:
        """Yield what stands in an array of tables, each with its place."""
        values = table.get(place.rpartition(".")[2], [])
        if not isinstance(values, list):
            self.fail(place, "not a list of tables", form)
        for number, value in enumerate(values):
            yield value, f"{place}[{number}]"

    def table(self, value: object, place: str, keys: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(place, "not a table", ", ".join(keys), value)
        self.known(value, f"{place}.", keys)
        return value

    def known(self, table: dict[str, Any], prefix: str, keys: tuple[str, ...]) -> None:
        for key in table:
            if key not in keys:
                self.fail(f"{prefix}{key[:40]}", "unknown key", ", ".join(keys))

    def fail(
        self,
        place: str,
        problem: str,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> NoReturn:
        raise RequestError(
            problem,
            path=self.path,
            place=place or None,
            expected=expected,
            found=found,
            hint=hint,
        )


_HEADING = """\
# A machine, as moepack knows it. A figure says where it comes from: it was measured, or read from
# the kernel or a driver; what you type is a text alone, such as bandwidth = "936 GB/s".
# What is not known is left out. Lengths: MiB, GiB, MB, GB …; bandwidths: MiB/s, GiB/s, and
# MB/s, GB/s as makers have them.
"""
_NO_GPU = """\

# For each GPU:
# [[gpus]]
# name = "…"
# length = "24 GiB"
# bandwidth = "936 GB/s"
# link = "31.5 GB/s"  # from memory: 31.5 GB/s is PCIe 4.0 with 16 lanes
# compute = "71 TFLOP/s"
"""
_NO_DRIVE = """\

# [drive]
# bandwidth = "7 GB/s"
"""


def toml_text(machine: Machine) -> str:
    """Return a machine as the text of a machine.toml, which `read_machine` reads as the same."""
    return "\n".join(_lines(machine)) + "\n"


def _lines(machine: Machine) -> Iterator[str]:
    yield _HEADING.rstrip("\n")
    yield from _text("name", machine.name)
    yield from ("", "[memory]", f"length = {_figure(machine.memory, length_text)}")
    if machine.memory_bandwidth is None:
        yield f'# bandwidth = "51.2 GB/s"  # {_BY_TRANSFERS}'
    yield from _bandwidth(machine.memory_bandwidth)
    if machine.compute is not None:
        yield from ("", "[processor]", f"compute = {_figure(machine.compute, compute_text)}")
    for gpu in machine.gpus:
        yield from ("", "[[gpus]]", *_text("name", gpu.name))
        yield f"length = {_figure(gpu.memory, length_text)}"
        yield from _bandwidth(gpu.bandwidth)
        if gpu.link is not None:
            yield f"link = {_figure(gpu.link, speed_text)}"
        if gpu.compute is not None:
            yield f"compute = {_figure(gpu.compute, compute_text)}"
    if not machine.gpus:
        yield _NO_GPU.rstrip("\n")
    drive = machine.drive
    if drive is None:
        yield _NO_DRIVE.rstrip("\n")
        return
    yield from ("", "[drive]", *_text("path", drive.path), *_bandwidth(drive.bandwidth))
    if drive.sequential is not None:
        yield f"sequential = {_figure(drive.sequential, speed_text)}"
    for length, depth, bandwidth in drive.reads:
        yield from ("", "[[drive.reads]]", f'length = "{length_text(length)}"', f"depth = {depth}")
        yield from _bandwidth(bandwidth)


def _bandwidth(figure: Figure | None) -> Iterator[str]:
    if figure is not None:
        yield f"bandwidth = {_figure(figure, speed_text)}"


def _text(key: str, text: str | None) -> Iterator[str]:
    if text is not None:
        yield f"{key} = {json.dumps(one_line(text), ensure_ascii=False)}"


def _figure(figure: Figure, text: Callable[[float], str]) -> str:
    value = f'"{text(figure.value)}"'
    ends = {"lowest": figure.lowest, "highest": figure.highest}
    spread = "".join(f', {key} = "{text(end)}"' for key, end in ends.items() if end is not None)
    if figure.basis == "typed" and not spread:
        return value
    return f'{{ value = {value}, is = "{figure.basis}"{spread} }}'
