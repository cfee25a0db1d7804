"""Texts that are computed together or in turn, by what the calls of the model for them took."""

import asyncio

import pytest

from moepack.running.serving.admission import Admission, Turns
from moepack.running.streaming.control import CacheStatistics

MOST, BUDGET = 4, 1000


class Texts:
    """Texts on a machine that decodes `speeds[count - 1]` tokens a second of so many at once.

    A call of one text uses experts of `length` bytes, and others as many.
    """

    def __init__(self, *speeds: float, length: int = 10) -> None:
        self.speeds, self.length = speeds, length
        self.admission = Admission(MOST)
        self.now = CacheStatistics(budget=BUDGET)

    def decode(self, count: int, calls: int = 100, speed: float | None = None) -> None:
        """Have so many texts decode in small pieces."""
        for _ in range(calls):
            seconds = count / (speed or self.speeds[count - 1])
            self.now = self.now._replace(
                decoding_count=self.now.decoding_count + 1,
                decoded_count=self.now.decoded_count + count,
                decoding_nanoseconds=self.now.decoding_nanoseconds + int(seconds * 1e9),
                decoded_length=self.now.decoded_length + count * self.length,
            )
            self.admission.note(count, self.now)

    def settle(self) -> int:
        """Have texts join as long as they may; return how many then run."""
        count = 1
        while self.admission.allows(count):
            count += 1
            self.decode(count)
        return count


def test_a_text_joins_when_it_is_known_what_the_others_need() -> None:
    texts = Texts(10, 20)
    assert texts.admission.allows(0)
    assert not texts.admission.allows(1)
    assert not texts.admission.refuses(1)
    texts.decode(1, calls=19)
    assert not texts.admission.allows(1), "the first calls read what the text needs"
    texts.decode(1, calls=1)
    assert texts.admission.allows(1)


@pytest.mark.parametrize(
    ("speeds", "length", "count"),
    [
        ((10, 11, 12, 13), 10, 4),
        ((10, 11, 12, 11), 10, 4),  # the fourth has been tried, and stays to its end
        ((10, 11, 10, 13), 10, 3),
        ((10, 9, 12, 13), 10, 2),
        ((10, 11, 12, 13), 375, 4),
        ((10, 11, 12, 13), 376, 3),
        ((10, 11, 12, 13), 751, 1),
    ],
)
def test_texts_join_while_their_experts_fit_and_they_are_faster_in_sum(
    speeds: tuple[float, ...], length: int, count: int
) -> None:
    texts = Texts(*speeds, length=length)
    texts.decode(1)
    assert texts.settle() == count
    assert not texts.admission.allows(count)


def test_more_texts_that_were_slower_are_tried_again_when_texts_are_others() -> None:
    texts = Texts(10, 9)
    texts.decode(1)
    assert texts.settle() == 2
    texts.decode(1)
    assert not texts.admission.allows(1)
    texts.decode(1, calls=3900)
    assert not texts.admission.allows(1)
    texts.decode(1, calls=200)
    assert texts.admission.allows(1)


def test_a_few_slow_calls_of_more_texts_are_no_judgement() -> None:
    texts = Texts(10, 9)
    texts.decode(1)
    texts.decode(2, calls=60)
    texts.decode(1, calls=10)
    assert texts.admission.allows(1)
    texts.decode(2, calls=60)
    texts.decode(1, calls=10)
    assert not texts.admission.allows(1)


def test_the_latest_calls_count_most() -> None:
    texts = Texts(10, 12)
    texts.decode(1, calls=3000, speed=20)
    texts.decode(2)
    texts.decode(1, calls=100)
    assert not texts.admission.allows(1)
    texts.decode(1, calls=3000)
    texts.decode(2)
    texts.decode(1)
    assert texts.admission.allows(1)


def test_with_all_experts_in_memory_as_many_texts_run_as_there_are_slots() -> None:
    texts = Texts()
    texts.admission.note(1, texts.now._replace(holds_all=1))
    assert [count for count in range(9) if texts.admission.allows(count)] == [0, 1, 2, 3]
    assert not texts.admission.refuses(1)


class Room:
    """Clients that want a turn, each with a name, and the order in which they had one."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.order: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._clients: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self._clients[name] = asyncio.create_task(self._take(name))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)

    async def _take(self, name: str) -> None:
        async with self._turns.turn():
            self.order.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await asyncio.sleep(0.01)

    async def leave(self, name: str) -> None:
        self._clients[name].cancel()
        await asyncio.sleep(0.01)


def test_turns_are_in_the_order_of_arrival_and_who_leaves_frees_a_place() -> None:
    async def run() -> None:
        room = Room(Turns(2, lambda: None, print))
        await room.come(*"abcdef")
        assert room.order == ["a", "b"]
        await room.leave("c")
        await room.end("b")
        assert room.order == ["a", "b", "d"]
        await room.leave("a")
        assert room.order == ["a", "b", "d", "e"]
        await room.end("d")
        await room.end("e")
        await room.come("g", "h")
        assert room.order == [*"abdefg"]

    asyncio.run(run())


def test_one_that_leaves_as_its_turn_comes_frees_it() -> None:
    async def run() -> None:
        room = Room(Turns(1, lambda: None, print))
        await room.come("a", "b", "c")
        room._ends["a"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # a has ended, and b does not know yet that it is its turn
        await room.leave("b")
        assert room.order[-1] == "c"

    asyncio.run(run())


def test_texts_that_wait_begin_as_soon_as_it_is_known_that_they_may() -> None:
    """Not when another ends."""
    texts = Texts(10, 20, length=600)
    log: list[str] = []

    async def run() -> None:
        room = Room(Turns(4, lambda: texts.now, log.append))
        await room.come("a", "b", "c")
        assert room.order == ["a"]
        for _ in range(4):
            await asyncio.sleep(0.26)
            texts.decode(1, calls=10)
        await asyncio.sleep(0.3)
        assert room.order == ["a", "b"]
        assert not log
        for _ in range(4):
            await asyncio.sleep(0.26)
            texts.decode(2, calls=10)
        await asyncio.sleep(0.3)
        assert room.order == ["a", "b"]
        assert "-np N" in log[0]

    asyncio.run(run())
