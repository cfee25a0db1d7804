"""Memory for experts: as much as was given or is free, and given back when it is not needed."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from moepack.common.errors import RequestError
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import size_text
from moepack.host.memory_limits import read_memory
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.pack import Pack
from moepack.running.pager.budget import FreeMemory
from moepack.running.pager.mapped_model import map_model, slot_length
from moepack.running.pager.pager import Pager, PagerOptions
from moepack.running.pager.resident_experts import ResidentExperts
from moepack.running.pager.slots import SlotPool
from moepack.traces.caching import cache as caching
from tests.support.needs import needs_llama
from tests.support.pagers import PROMPTS, Form, paging

MIB = 1 << 20
PAGE = 4096


def write_pressure(path: Path, percent: float) -> None:
    path.write_text(
        f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=1\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
    )


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(800, 0, 500, 1300), (100_000, 0, 500, 4000)], id="up to all experts"),
        pytest.param([(510, 0, 500, 1000), (564, 0, 500, 1064)], id="not for small changes"),
        pytest.param([(-100, 0, 900, 800), (-5000, 0, 800, 100)], id="down to the floor"),
        pytest.param(
            [(1000, 10.5, 800, 700), (1000, 10.5, 700, 612.5), (1000, 9.5, 600, 1600)],
            id="down while the system waits for memory",
        ),
    ],
)
def test_the_budget_follows_free_memory(
    tmp_path: Path, steps: list[tuple[int, float, int, float]]
) -> None:
    """Steps are MiB that are free, percent of the time that waits, resident MiB, and the budget."""
    spare = [1000 * MIB]
    pressure = tmp_path / "memory"
    write_pressure(pressure, 0)
    memory = FreeMemory(100 * MIB, 4000 * MIB, lambda: spare[0], pressure)
    assert memory.budget == 1000 * MIB
    for free, percent, resident, budget in steps:
        spare[0] = free * MIB
        write_pressure(pressure, percent)
        assert memory.follow(resident * MIB) == budget * MIB


@pytest.mark.parametrize("text", ["", "some", "some avg10=much", None])
def test_a_system_that_tells_no_pressure_has_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "memory").write_text(text)
    memory = FreeMemory(100 * MIB, 4000 * MIB, lambda: 1000 * MIB, tmp_path / "memory")
    assert memory.follow(800 * MIB) == 1800 * MIB


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool([8 * PAGE] * 4 + [2 * PAGE] * 2)
    yield pool
    pool.close()


def length_on_disk(pool: SlotPool) -> int:
    return os.fstat(pool.descriptor).st_blocks * 512


def test_slots_lie_apart_and_released_ones_come_first(pool: SlotPool) -> None:
    lengths = [8 * PAGE] * 4 + [2 * PAGE] * 2
    slots = [(pool.allocate(length), length) for length in lengths]
    for number, (offset, length) in enumerate(slots, 1):
        pool.view[offset : offset + length] = bytes([number]) * length
    for number, (offset, length) in enumerate(slots, 1):
        assert os.pread(pool.descriptor, length, offset) == bytes([number]) * length
    assert length_on_disk(pool) == 36 * PAGE
    first, _ = slots[0]
    pool.release(first, 8 * PAGE)
    assert pool.spare_length == 8 * PAGE
    assert pool.allocate(8 * PAGE) == first
    assert pool.spare_length == 0


def test_long_slots_get_huge_pages_where_the_system_has_them() -> None:
    length = 3 * MIB
    with closing(SlotPool([length] * 4)) as pool:
        slots = [pool.allocate(length) for _ in range(4)]
        allocated = length_on_disk(pool)
        for number, slot in enumerate(slots):
            assert not any(pool.view[slot : slot + length])
            pool.view[slot : slot + length] = bytes([number + 1]) * length
        for number, slot in enumerate(slots):
            assert pool.view[slot : slot + length] == bytes([number + 1]) * length
        assert length_on_disk(pool) == 12 * MIB
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
        pytest.skip("this kernel collapses no shared memory into huge pages")
    assert allocated == 12 * MIB


def test_memory_of_spare_slots_is_freed_beyond_a_limit(pool: SlotPool) -> None:
    offsets = [pool.allocate(8 * PAGE) for _ in range(4)]
    for offset in offsets:
        pool.view[offset : offset + 8 * PAGE] = b"x" * (8 * PAGE)
    for offset in offsets[:3]:
        pool.release(offset, 8 * PAGE)
    pool.trim(24 * PAGE)
    assert length_on_disk(pool) == 32 * PAGE
    pool.trim(15 * PAGE)
    assert (length_on_disk(pool), pool.spare_length) == (16 * PAGE, 8 * PAGE)
    pool.trim(0)
    assert (length_on_disk(pool), pool.spare_length) == (8 * PAGE, 0)
    assert os.pread(pool.descriptor, 8 * PAGE, offsets[3]) == b"x" * (8 * PAGE)
    assert sorted(pool.allocate(8 * PAGE) for _ in range(3)) == sorted(offsets[:3])


def test_spare_slots_of_other_lengths_make_room_for_what_is_read(packs: dict[str, Path]) -> None:
    """Experts of one layer come after shorter ones of another layer."""
    with Pack(packs["qwen3moe"]) as pack, pack.reader() as reader:
        model = map_model(pack)
        spans = model.spans()[ROUTED_FAMILY]
        first, second = ([key for key in spans if key.layer == layer] for layer in (0, 1))
        lengths = {key: slot_length(parts) for key, parts in spans.items()}
        budget = sum(lengths[key] for key in second)
        assert lengths[first[0]] < lengths[second[0]]
        cache = caching.make("lru", budget, lengths, ())
        residents = ResidentExperts(reader, spans, lengths, cache, 0, model)
        for keys in (first, second):
            lacking = residents.look_up(keys)
            residents.release(residents.evicted)
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


@pytest.mark.parametrize(("beside", "is_short"), [(0, False), (1 << 50, True)])
def test_memory_that_programs_are_yet_to_take_is_left_to_them(
    beside: int, is_short: bool, form: Form
) -> None:
    """The least for experts is taken nevertheless."""
    with paging(form("qwen3moe", "pack"), beside=beside) as run:
        assert run.pager.is_short == is_short
        assert (run.pager.budget == run.pager.floor) == is_short


def test_the_floor_grows_with_micro_batches_up_to_a_layer(form: Form) -> None:
    model = form("qwen3moe", "gguf")
    floors = [floor_of(model, count) for count in (1, 2, 3, 4, 5, 512)]
    assert floors == sorted(floors)
    assert floors[0] < floors[1] < floors[2] < floors[3] == floors[4] == floors[5]


def test_memory_and_pins_are_texts_too(form: Form) -> None:
    model = form("qwen3moe", "pack")
    with open_model([model]) as pack:
        pinned = pack.hottest("25%")
    whole = read_memory()
    for memory, budget in (("64M", 64 << 20), ("50%", whole // 2)):
        with paging(model, memory=memory, pinned="25%", micro_batch=1) as run:
            assert run.pager.budget == budget
            assert len(run.pager._residents) == len(pinned) > 0
            assert all(key in run.pager._residents for key in pinned)
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
