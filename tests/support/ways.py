"""Every way to read experts, in one form, for promises about all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import moepack
from moepack.common.errors import MoepackError
from moepack.pack.reading.pack import Pack

LENGTH = 1 << 17
"""Bytes of a buffer, more than any expert here takes."""
_REST = 0xAA


@dataclass
class Reading:
    """Experts to read, and the bytes and errors that came.

    `experts` has bytes by the number of the key and the name of the part; by the empty name those
    of the whole view. `order` has the numbers as they came, and -1 for an error.
    """

    pack: Pack
    keys: Sequence[tuple[int, int]]
    parts: tuple[str, ...] | None = None
    family: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    experts: dict[int, dict[str, bytes]] = field(default_factory=dict)
    errors: list[MoepackError] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    statistics: moepack.Statistics | None = None
    """The reader's, at the end."""

    def names(self, layer: int) -> tuple[str, ...]:
        """Return the names of the parts to read."""
        kinds = self.pack.parts(layer, family=self.family)
        return self.parts or tuple(kind.name for kind in kinds)

    def singles(self) -> list[tuple[int, tuple[int, int], str | None]]:
        """List the calls that read one thing each: number, key, part."""
        parts = self.parts or (None,)
        return [(n, key, part) for n, key in enumerate(self.keys) for part in parts]

    def add(self, number: int, part: str | None, data: memoryview) -> None:
        """Add the bytes that one call gave."""
        self.experts.setdefault(number, {})[part or ""] = bytes(data)
        self.order.append(number)

    def fail(self, error: MoepackError) -> None:
        """Add an error in place of bytes."""
        self.errors.append(error)
        self.order.append(-1)

    def add_expert(self, one: moepack.ExpertBytes, *, has_view: bool) -> None:
        """Add an expert of a batch."""
        assert (one.layer, one.expert) == self.keys[one.number]
        contents = {name: bytes(one.part(name)) for name in self.names(one.layer)}
        self.experts[one.number] = contents | ({"": bytes(one.view)} if has_view else {})
        self.order.append(one.number)


Way = Callable[[Reading], None]


def filled() -> bytearray:
    return bytearray([_REST]) * LENGTH


def is_filled(buffer: bytearray, start: int) -> bool:
    """Return whether nothing was written from a byte on."""
    return buffer.count(_REST, start) == len(buffer) - start


def _single(reading: Reading, *, into: bool) -> None:
    with reading.pack.reader(**reading.options) as reader:
        for number, key, part in reading.singles():
            try:
                if into:
                    buffer = filled()
                    length = reader.read_into(buffer, *key, part, family=reading.family)
                    assert is_filled(buffer, length)
                    view = memoryview(buffer)[:length]
                else:
                    view = reader.read(*key, part, family=reading.family)
                reading.add(number, part, view)
            except MoepackError as error:
                reading.fail(error)
        assert reader.statistics.in_flight_count == 0
        reading.statistics = reader.statistics


def _batch(reading: Reading, *, in_order: bool, memory: str = "new") -> None:
    into: list[Any] | None = None
    if memory == "into":
        into = [filled() for _ in reading.keys]
    if memory == "scattered":
        into = [{name: filled() for name in reading.names(key[0])} for key in reading.keys]
    with reading.pack.reader(**reading.options) as reader:
        try:
            batch = reader.submit(
                reading.keys, parts=reading.parts, family=reading.family, into=into
            )
        except MoepackError as error:
            reading.errors.append(error)
            return
        with batch:
            while len(batch):
                try:
                    for one in batch.completions(in_order=in_order):
                        reading.add_expert(one, has_view=memory != "scattered")
                        if into is not None and memory == "into":
                            assert is_filled(into[one.number], len(one.view))
                        if into is not None and memory == "scattered":
                            for name, buffer in into[one.number].items():
                                assert is_filled(buffer, len(one.part(name)))
                except MoepackError as error:
                    reading.fail(error)
        assert reader.statistics.in_flight_count == reader.statistics.in_flight_length == 0
        reading.statistics = reader.statistics


WAYS: dict[str, Way] = {
    "read": partial(_single, into=False),
    "read_into": partial(_single, into=True),
    "batch": partial(_batch, in_order=True),
    "as they come": partial(_batch, in_order=False),
    "into": partial(_batch, in_order=False, memory="into"),
    "scattered": partial(_batch, in_order=False, memory="scattered"),
}
IN_ORDER = ("read", "read_into", "batch")
"""Ways by which experts come in the order of their keys."""
READS_TO_NEW_MEMORY = ("read", "batch", "as they come")
"""Ways for which the reader allocates memory."""
