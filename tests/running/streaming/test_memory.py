"""Memory for experts: as much as was given or is free, and given back when it is not needed."""

from pathlib import Path

import pytest

from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey
from moepack.common.sizes import size_text
from moepack.host.memory_limits import own_memory, read_memory
from moepack.pack.opening.open_model import open_model
from moepack.running.streaming.budget import FreeMemory, MemoryParts
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor
from tests.support.children import wait_until
from tests.support.gguf_builder import F32, add_experts, moe
from tests.support.needs import needs_llama
from tests.support.supervised import PROMPTS, Form, length_of, slot_lengths, slots_of, supervised

MIB = 1 << 20


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


def floor_of(model: Path, micro_batch: int) -> int:
    with supervised(model, memory="floor", micro_batch=micro_batch) as run:
        return run.supervisor.budget


@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_less_than_the_floor_is_refused_and_both_are_named(form: Form, kind: str) -> None:
    model = form("qwen3moe", kind)
    floor = floor_of(model, 2)
    with open_model([model]) as pack, pytest.raises(RequestError) as refusal:
        Supervisor(pack, StreamingOptions(memory=floor - 1, micro_batch=2), lambda error: None)
    assert size_text(floor) in str(refusal.value)
    assert size_text(floor - 1) in str(refusal.value)
    with supervised(model, memory=floor, micro_batch=2):
        pass


@pytest.mark.parametrize(("beside", "is_short"), [(0, False), (1 << 50, True)])
def test_memory_that_programs_are_yet_to_take_is_left_to_them(
    beside: int, is_short: bool, form: Form
) -> None:
    """The least for experts is taken nevertheless."""
    with supervised(form("qwen3moe", "pack"), beside=MemoryParts(texts=beside)) as run:
        assert run.supervisor.is_short == is_short
        assert (run.supervisor.budget == run.supervisor.floor) == is_short


def test_memory_that_was_taken_beside_experts_is_left_free_no_more(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has long taken more; dense weights lie in the page cache, which is free."""
    spare = 32 * MIB
    monkeypatch.setattr(FreeMemory.__init__, "__defaults__", (lambda: spare, Path("/nothing")))
    for parts, grows in ((MemoryParts(program=spare), True), (MemoryParts(dense=spare), False)):
        with supervised(form("qwen3moe", "pack"), beside=parts, micro_batch=1) as run:
            floor = run.supervisor.floor
            run.supervisor._follow_memory()
            assert (run.supervisor.budget > floor) == grows


def test_the_memory_of_programs_is_known_by_their_ids(form: Form, ggml: Path) -> None:
    model = form("qwen3moe", "gguf")
    with supervised(model, micro_batch=1) as run, run.chooser(ggml, model) as program:
        assert program.call([(0, 0, [[1]], 1)]) == [[0]]
        (number,) = run.supervisor._control.live()
        assert run.supervisor._control.holder(number) == program.process.pid
        assert own_memory(program.process.pid) > MIB
        assert own_memory(1 << 22) == 0, "no process has this id"


def test_the_floor_grows_with_micro_batches_up_to_a_layer(form: Form) -> None:
    model = form("qwen3moe", "gguf")
    floors = [floor_of(model, count) for count in (1, 2, 3, 4, 5, 512)]
    assert floors == sorted(floors)
    assert floors[0] < floors[1] < floors[2] < floors[3] == floors[4] == floors[5]


def test_memory_and_pins_are_texts_too(form: Form, ggml: Path) -> None:
    """What is pinned stays, whatever comes after it."""
    model = form("qwen3moe", "gguf")
    with open_model([model]) as pack:
        pinned = pack.hottest("25%")
    length = sum(slot_lengths(model)[key] for key in pinned)
    for memory, budget in (("64M", 64 << 20), ("50%", read_memory() // 2), ("floor", None)):
        with supervised(model, memory=memory, pinned="25%", micro_batch=1) as run:
            assert run.supervisor.budget == (budget or run.supervisor.floor)
            with run.chooser(ggml, model) as program:
                wait_until(lambda: run.supervisor.usage.expert_length == length)
                every = [(0, layer, [[one]], 1) for layer in (0, 1) for one in range(16)]
                for graphs in (every, [(0, key.layer, [[key.expert]], 1) for key in pinned]):
                    before = run.supervisor.usage.miss_count
                    assert program.call(graphs) == [[0] * len(graphs)]
                assert run.supervisor.usage.miss_count == before
    with open_model([model]) as pack, pytest.raises(RequestError, match="pin: not a size"):
        Supervisor(pack, StreamingOptions(pinned="much", micro_batch=1), lambda error: None)


def test_pages_made_ready_for_experts_of_other_lengths_are_given_back(
    tmp_path: Path, ggml: Path
) -> None:
    """They are made ready for all lengths alike, and then those of one length take all memory.

    Huge pages are whole: where the slots of each length end, and where the second ones begin.
    """
    builder = moe((0,), 32, ne=(512, 512), type_id=F32, block=(1, 4), block_count=2)
    add_experts(builder, 1, 32, (512, 768), F32, (1, 4))
    model = builder.write(tmp_path / "m.gguf")
    memory, longest = 64 * MIB, slot_lengths(model)[ExpertKey(1, 0)]
    with (
        supervised(model, memory=memory, micro_batch=1) as run,
        run.chooser(ggml, model) as program,
    ):
        slots = slots_of(program.process.pid)
        wait_until(lambda: length_of(slots) > memory - 2 * longest)
        for expert in range(16):
            assert program.call([(0, 1, [[expert]], 1)]) == [[0]]
            assert length_of(slots) <= memory + 3 * 2 * MIB, f"after {expert + 1} experts"


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_memory_shrinks_and_grows_while_a_program_runs(
    form: Form, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the file that it maps slots of, though it computes nothing."""
    spare = [1 << 30]
    monkeypatch.setattr(FreeMemory.__init__, "__defaults__", (lambda: spare[0], Path("/nothing")))
    with (
        supervised(form("qwen3moe", kind), micro_batch=1) as run,
        run.program("--micro-batch", 1) as program,
    ):
        slots = slots_of(program.process.pid)
        prompt = PROMPTS[1][0]
        expected = program.ask(prompt)
        whole = run.supervisor.usage.resident_length
        assert whole > 1_000_000
        spare[0] = -whole * 2
        wait_until(lambda: length_of(slots) <= run.supervisor.budget < whole // 2)
        assert run.supervisor.usage.resident_length <= run.supervisor.budget
        assert program.ask(prompt) == expected
        assert length_of(slots) <= run.supervisor.budget
        spare[0] = 1 << 30
        wait_until(lambda: run.supervisor.budget > whole)
        wait_until(lambda: run.supervisor._control.statistics()[-1].memory > whole)
        assert program.ask(prompt) == expected
        assert length_of(slots) > whole // 2
