"""Every way to read experts, in one form, for promises about all of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import moepack
import moepack.aio
from moepack.common.errors import MoepackError
from moepack.pack.reading.pack import Pack
from tests.support.children import PATIENCE

LENGTH = 1 << 17
"""Bytes of a buffer, more than any expert here takes."""
_REST = 0xAA


@dataclass
class Reading:
    """Experts to read, and the bytes and errors that came.

    `experts` has bytes by the number of the key and the name of the part; by the empty name those
    of the whole view. `order` has the numbers as they came.
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
                reading.errors.append(error)
        assert reader.statistics.in_flight_count == 0
        reading.statistics = reader.statistics


def _batch(reading: Reading, *, in_order: bool, memory: str = "new") -> None:
    pool = moepack.BufferPool(3, LENGTH) if memory == "pool" else None
    into: list[Any] | None = None
    if memory == "into":
        into = [filled() for _ in reading.keys]
    if memory == "scattered":
        into = [{name: filled() for name in reading.names(key[0])} for key in reading.keys]
    with reading.pack.reader(pool=pool, **reading.options) as reader:
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
                        one.release()
                except MoepackError as error:
                    reading.errors.append(error)
        assert reader.statistics.in_flight_count == reader.statistics.in_flight_length == 0
        assert pool is None or pool.free_count == 3
        reading.statistics = reader.statistics


def _asyncio(reading: Reading, *, how: str) -> None:
    """Read in an event loop, which may not complain."""
    complaints: list[str] = []

    async def single(
        reader: moepack.aio.Reader, number: int, key: tuple[int, int], part: str | None
    ) -> None:
        try:
            if how == "into":
                buffer = filled()
                length = await reader.read_into(buffer, *key, part, family=reading.family)
                assert is_filled(buffer, length)
                view = memoryview(buffer)[:length]
            else:
                view = await reader.read(*key, part, family=reading.family)
            reading.add(number, part, view)
        except MoepackError as error:
            reading.errors.append(error)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
        async with (
            asyncio.timeout(PATIENCE),
            moepack.aio.Reader(reading.pack, **reading.options) as reader,
        ):
            if how in ("single", "into"):
                await asyncio.gather(*(single(reader, *call) for call in reading.singles()))
            else:
                buffers = [filled() for _ in reading.keys]
                try:
                    async for one in reader.read_many(
                        reading.keys,
                        parts=reading.parts,
                        family=reading.family,
                        into=None if how == "in order" else buffers,
                        in_order=how == "in order",
                    ):
                        reading.add_expert(one, has_view=True)
                        if how != "in order":
                            assert is_filled(buffers[one.number], len(one.view))
                except MoepackError as error:
                    reading.errors.append(error)
            assert reader.statistics.in_flight_count == 0
            reading.statistics = reader.statistics

    asyncio.run(main())
    assert complaints == []


WAYS: dict[str, Way] = {
    "read": partial(_single, into=False),
    "read_into": partial(_single, into=True),
    "batch": partial(_batch, in_order=True),
    "as they come": partial(_batch, in_order=False),
    "pool": partial(_batch, in_order=False, memory="pool"),
    "pool in order": partial(_batch, in_order=True, memory="pool"),
    "into": partial(_batch, in_order=False, memory="into"),
    "scattered": partial(_batch, in_order=False, memory="scattered"),
    "asyncio": partial(_asyncio, how="single"),
    "asyncio into": partial(_asyncio, how="into"),
    "asyncio loop": partial(_asyncio, how="in order"),
    "asyncio as they come": partial(_asyncio, how="as they come"),
}
ENDS_WITH_AN_ERROR = ("asyncio loop", "asyncio as they come")
"""Loops in which nothing comes after the first error."""
IN_ORDER = ("read", "read_into", "batch", "pool in order", "asyncio loop")
"""Ways by which experts come in the order of their keys."""
READS_TO_NEW_MEMORY = ("read", "batch", "as they come", "asyncio", "asyncio loop")
"""Ways for which the reader allocates memory."""
