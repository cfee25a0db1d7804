"""Memory for experts: as much as was given or is free, and given back when it is not needed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moepack.caching import cache as caching
from moepack.errors import RequestError
from moepack.keys import ExpertKey
from moepack.machine.memory_limits import read_memory
from moepack.packing.opening import open_model
from moepack.pager.budget import FreeMemory
from moepack.pager.mapped_model import map_model, slot_room
from moepack.pager.pager import Pager, PagerOptions
from moepack.pager.residents import Residents
from moepack.pager.slots import SlotPool
from moepack.reading.pack import Pack
from moepack.shape import ROUTED_FAMILY
from moepack.sizes import size_text
from tests.support.models import first_shard, pack_model
from tests.support.needs import needs_llama
from tests.support.pagers import PROMPTS, paging

Form = Callable[[str, str], Path]
MIB = 1 << 20
PAGE = 4096


class Machine:
    """So many bytes are free, and so many percent of the time something waits for memory."""

    def __init__(self, folder: Path, spare: int) -> None:
        self.spare = spare
        self.pressure = folder / "memory"
        self.stall(0.0)

    def stall(self, percent: float) -> None:
        total = "total=1"
        some = f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 {total}\n"
        self.pressure.write_text(some + f"full avg10=0.00 avg60=0.00 avg300=0.00 {total}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, 1000 * MIB)


@pytest.fixture
def memory(machine: Machine) -> FreeMemory:
    return FreeMemory(100 * MIB, 4000 * MIB, lambda: machine.spare, machine.pressure)


def test_the_budget_is_what_is_free_at_first(memory: FreeMemory) -> None:
    assert memory.budget == 1000 * MIB


def test_it_grows_with_what_is_free_and_up_to_all_experts(
    memory: FreeMemory, machine: Machine
) -> None:
    machine.spare = 800 * MIB
    assert memory.follow(500 * MIB) == 1300 * MIB
    machine.spare = 100_000 * MIB
    assert memory.follow(500 * MIB) == 4000 * MIB


def test_small_changes_upwards_are_let_be(memory: FreeMemory, machine: Machine) -> None:
    machine.spare = 510 * MIB
    assert memory.follow(500 * MIB) == 1000 * MIB
    machine.spare = 564 * MIB
    assert memory.follow(500 * MIB) == 1064 * MIB


def test_it_shrinks_at_once_and_down_to_the_floor(memory: FreeMemory, machine: Machine) -> None:
    machine.spare = -100 * MIB
    assert memory.follow(900 * MIB) == 800 * MIB
    machine.spare = -5000 * MIB
    assert memory.follow(800 * MIB) == 100 * MIB


def test_it_shrinks_while_the_system_waits_for_memory(memory: FreeMemory, machine: Machine) -> None:
    machine.stall(10.5)
    assert memory.follow(800 * MIB) == 700 * MIB
    assert memory.follow(700 * MIB) == 700 * MIB - 700 * MIB // 8
    machine.stall(9.5)
    assert memory.follow(600 * MIB) == 1600 * MIB


@pytest.mark.parametrize("text", ["", "some", "some avg10=much", None])
def test_a_system_that_tells_no_pressure_has_none(
    memory: FreeMemory, machine: Machine, text: str | None
) -> None:
    machine.pressure.unlink()
    if text is not None:
        machine.pressure.write_text(text)
    assert memory.follow(800 * MIB) == 1800 * MIB


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool([8 * PAGE] * 4 + [2 * PAGE] * 2)


def length_on_disk(pool: SlotPool) -> int:
    return os.fstat(pool.descriptor).st_blocks * 512


def test_slots_lie_apart_and_keep_their_bytes(pool: SlotPool) -> None:
    slots = [(pool.take(8 * PAGE), 8 * PAGE) for _ in range(4)]
    slots += [(pool.take(2 * PAGE), 2 * PAGE) for _ in range(2)]
    for number, (offset, length) in enumerate(slots, 1):
        pool.view[offset : offset + length] = bytes([number]) * length
    for number, (offset, length) in enumerate(slots, 1):
        assert os.pread(pool.descriptor, length, offset) == bytes([number]) * length
    assert length_on_disk(pool) == 36 * PAGE
    pool.close()


def test_a_slot_that_was_given_back_is_taken_before_new_ones(pool: SlotPool) -> None:
    first, second = pool.take(8 * PAGE), pool.take(8 * PAGE)
    pool.give_back(first, 8 * PAGE)
    assert pool.spare_length == 8 * PAGE
    assert pool.take(8 * PAGE) == first
    assert pool.spare_length == 0
    assert pool.take(8 * PAGE) not in (first, second)
    pool.close()


def test_long_slots_get_huge_pages_where_the_system_has_them() -> None:
    length = 3 * MIB
    pool = SlotPool([length] * 4)
    try:
        slots = [pool.take(length) for _ in range(4)]
        allocated = os.fstat(pool.descriptor).st_blocks * 512
        for number, slot in enumerate(slots):
            assert not any(pool.view[slot : slot + length])
            pool.view[slot : slot + length] = bytes([number + 1]) * length
        for number, slot in enumerate(slots):
            assert pool.view[slot : slot + length] == bytes([number + 1]) * length
        assert os.fstat(pool.descriptor).st_blocks * 512 == 12 * MIB
    finally:
        pool.close()
    if kernel_version() < (6, 1):
        pytest.skip("this kernel collapses no shared memory into huge pages")
    assert allocated == 12 * MIB


def kernel_version() -> tuple[int, ...]:
    return tuple(int(number) for number in os.uname().release.split(".")[:2])


def test_memory_of_spare_slots_is_freed_beyond_a_limit(pool: SlotPool) -> None:
    offsets = [pool.take(8 * PAGE) for _ in range(4)]
    for offset in offsets:
        pool.view[offset : offset + 8 * PAGE] = b"x" * (8 * PAGE)
    for offset in offsets[:3]:
        pool.give_back(offset, 8 * PAGE)
    pool.trim(24 * PAGE)
    assert length_on_disk(pool) == 32 * PAGE
    pool.trim(15 * PAGE)
    assert (length_on_disk(pool), pool.spare_length) == (16 * PAGE, 8 * PAGE)
    pool.trim(0)
    assert (length_on_disk(pool), pool.spare_length) == (8 * PAGE, 0)
    assert os.pread(pool.descriptor, 8 * PAGE, offsets[3]) == b"x" * (8 * PAGE)
    assert sorted(pool.take(8 * PAGE) for _ in range(3)) == sorted(offsets[:3])
    pool.close()


def test_spare_slots_of_other_lengths_make_room_for_what_is_read(packs: dict[str, Path]) -> None:
    """Experts of one layer come after those of another, whose experts are shorter."""
    with Pack(packs["qwen3moe"]) as pack, pack.reader() as reader:
        model = map_model(pack)
        spans = model.places()[ROUTED_FAMILY]
        first, second = ([key for key in spans if key.layer == layer] for layer in (0, 1))
        rooms = {key: slot_room(parts) for key, parts in spans.items()}
        budget = sum(rooms[key] for key in second)
        assert rooms[first[0]] < rooms[second[0]]
        cache = caching.make("lru", budget, rooms, ())
        residents = Residents(reader, spans, rooms, cache, 0, model)
        for keys in (first, second):
            lacking = residents.look_up(keys)
            residents.release(residents.aside)
            with residents.read(lacking) as coming:
                assert list(coming) == lacking
            assert length_on_disk(residents._pool) <= budget
        residents.close()
        model.close()


def floor_of(model: Path, micro_batch: int) -> int:
    with paging(model, memory="floor", micro_batch=micro_batch) as run:
        return run.pager.budget


@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_less_than_the_floor_is_refused_and_both_are_named(form: Form, kind: str) -> None:
    model = form("qwen3moe", kind)
    floor = floor_of(model, 2)
    with open_model([model]) as pack, pytest.raises(RequestError) as refusal:
        Pager(pack, PagerOptions(memory=floor - 1, micro_batch=2), lambda error: None)
    assert size_text(floor) in str(refusal.value)
    assert size_text(floor - 1) in str(refusal.value)
    with paging(model, memory=floor, micro_batch=2):
        pass


def test_the_floor_grows_with_micro_batches_up_to_a_layer(form: Form) -> None:
    model = form("qwen3moe", "gguf")
    floors = [floor_of(model, count) for count in (1, 2, 3, 4, 5, 512)]
    assert floors == sorted(floors)
    assert floors[0] < floors[1] < floors[2] < floors[3] == floors[4] == floors[5]


def test_pinned_experts_are_there_from_the_start(tmp_path: Path) -> None:
    counts = {(layer, expert): 100 - expert for layer in range(2) for expert in range(16)}
    pack_model([first_shard("qwen3moe")], tmp_path / "pack", counts=counts)
    with paging(tmp_path / "pack", memory="floor", pinned=200_000, micro_batch=1) as run:
        residents = run.pager._residents
        assert all(ExpertKey(layer, expert) in residents for layer in (0, 1) for expert in (0, 1))
        assert len(residents) == 4


def test_memory_and_pins_are_texts_too(form: Form) -> None:
    model = form("qwen3moe", "pack")
    with open_model([model]) as pack:
        pinned = len(pack.hottest("25%"))
    whole = int(read_memory().value)
    for memory, budget in (("64M", 64 << 20), ("50%", whole // 2)):
        with paging(model, memory=memory, pinned="25%", micro_batch=1) as run:
            assert run.pager.budget == budget
            assert len(run.pager._residents) == pinned > 0
    with open_model([model]) as pack, pytest.raises(RequestError, match="pin: not a size"):
        Pager(pack, PagerOptions(pinned="much", micro_batch=1), lambda error: None)


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_memory_shrinks_and_grows_while_a_program_runs(
    form: Form, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is that of the file that programs map slots of."""
    spare = [1 << 30]
    monkeypatch.setattr(FreeMemory.__init__, "__defaults__", (lambda: spare[0], Path("/nothing")))
    with (
        paging(form("qwen3moe", kind), micro_batch=1) as run,
        run.program("--micro-batch", 1) as program,
    ):
        prompt = PROMPTS[1][0]
        expected = program.ask(prompt)
        pool = run.pager._residents._pool
        whole = length_on_disk(pool)
        assert whole > 1_000_000
        spare[0] = -whole * 2
        run.do(Pager._follow_memory)
        assert run.pager.usage.resident_length <= run.pager.budget < whole // 2
        assert length_on_disk(pool) <= run.pager.budget
        assert program.ask(prompt) == expected
        spare[0] = 1 << 30
        run.do(Pager._follow_memory)
        assert program.ask(prompt) == expected
        assert length_on_disk(pool) > whole // 2
