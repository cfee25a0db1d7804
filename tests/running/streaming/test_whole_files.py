"""Readers of a model get each byte as it is, announced or not; nobody reads zeros instead."""

import mmap
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from moepack.pack.engines.stock_gguf import lay_out
from moepack.pack.opening.open_model import open_model
from moepack.packing.pack_model import pack_model
from tests.support import architectures
from tests.support.gguf_builder import F32, Q8_0, add_experts, moe
from tests.support.needs import needs_library, needs_llama
from tests.support.supervised import Form, Program, image_of, supervised

PAGE = mmap.PAGESIZE
READER = "mapped_reader"


@needs_library
@pytest.mark.parametrize("model", ["qwen3moe", "gpt-oss", "granite"])
def test_an_image_is_read_right_in_any_order(form: Form, model: str, tmp_path: Path) -> None:
    expected = image_of(form(model, "pack"), tmp_path / "expected")
    with (
        supervised(form(model, "pack"), memory="floor", micro_batch=1) as run,
        run.program(expected, module=READER) as program,
    ):
        assert program.call("compare", 1, 1) == 0
        run.settle()  # when it has released what the last fault evicted
        usage = run.supervisor.usage
        assert usage.fault_count > 0
        assert usage.resident_length <= usage.budget
        assert program.call("compare", 8, 1) == 0
        assert not run.failures


@needs_llama
def test_experts_for_multi_token_prediction_are_read_right(tmp_path: Path) -> None:
    gguf = architectures.write("qwen35moe with MTP", tmp_path / "m.gguf")
    pack_model(gguf, tmp_path / "pack")
    expected = image_of(tmp_path / "pack", tmp_path / "expected")
    with (
        supervised(tmp_path / "pack", memory="floor", micro_batch=1) as run,
        run.program(expected, module=READER) as program,
    ):
        assert program.call("compare", 4, 1) == 0
        run.settle()
        assert run.supervisor.usage.resident_length <= run.supervisor.usage.budget


@needs_library
@pytest.mark.parametrize("mistake", ["signal", "write"])
def test_threads_that_block_all_signals_read_right_and_mistakes_end_a_program(
    form: Form, tmp_path: Path, mistake: str
) -> None:
    expected = image_of(form("qwen3moe", "pack"), tmp_path / "expected")
    with (
        supervised(form("qwen3moe", "pack"), memory="floor", micro_batch=1) as run,
        run.program(expected, module=READER) as program,
    ):
        assert program.call("blocked") == 0
        assert program.call(mistake) is None
        assert program.process.wait(60) == -signal.SIGSEGV


@needs_library
def test_a_program_that_has_all_maps_ends_and_reads_no_zeros(form: Form, tmp_path: Path) -> None:
    if int(Path("/proc/sys/vm/max_map_count").read_text()) > 1 << 20:
        pytest.skip("so many maps take too long")
    expected = image_of(form("qwen3moe", "pack"), tmp_path / "expected")
    with (
        supervised(form("qwen3moe", "pack"), memory=1 << 30, micro_batch=1) as run,
        run.program(expected, module=READER) as program,
    ):
        assert program.call("crowd") is None
        assert program.process.wait(60) == 70
        assert "the system maps no more memory" in program.complaint


@needs_library
@pytest.mark.parametrize("what", ["fork", "fork anew"])
def test_a_forked_child_of_a_program_with_an_image_dies_and_reads_no_zeros(
    form: Form, tmp_path: Path, what: str
) -> None:
    pack_path = form("qwen3moe", "pack")
    with supervised(pack_path, memory="floor", micro_batch=1) as run:
        expected = image_of(pack_path, tmp_path / "expected")
        with run.program(expected, module=READER) as program:
            assert program.call(what) < 0
            assert program.call("compare", 1, 1) == 0  # its parent goes on


@needs_library
@pytest.mark.parametrize("what", ["compare", "fork", "fork anew"])
def test_a_shard_is_read_right_by_a_program_and_by_its_forked_child(form: Form, what: str) -> None:
    with open_model([form("qwen3moe", "gguf")]) as pack:
        shard = pack.locate(0, 0, "ffn_gate_exps.weight").path
    arguments = (4, 2) if what == "compare" else ()
    with (
        supervised(form("qwen3moe", "gguf"), memory="floor", micro_batch=1) as run,
        Program(shard, shard, module=READER, **run.environment) as program,
    ):
        assert program.call(what, *arguments) == 0
        assert run.supervisor.usage.fault_count == 0


@needs_library
def test_layers_of_whole_pages_and_others_are_read_right_together(tmp_path: Path) -> None:
    """The parts of layer 0 fill whole pages, those of layer 1 do not."""
    builder = moe((0,), 4, ne=(64, 64), type_id=F32, block=(1, 4), block_count=2)
    add_experts(builder, 1, 4, (64, 32), Q8_0, (32, 34))
    pack_model(builder.write(tmp_path / "m.gguf"), tmp_path / "pack")
    expected = image_of(tmp_path / "pack", tmp_path / "expected")
    with (
        supervised(tmp_path / "pack", memory="floor", micro_batch=1) as run,
        run.program(expected, module=READER) as program,
    ):
        assert program.call("compare", 2, 2) == 0


@needs_library
def test_a_program_that_maps_another_file_is_none_that_has_the_model(
    form: Form, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"0" * 100_000)
    with (
        supervised(form("qwen3moe", "gguf"), memory="floor", micro_batch=1) as run,
        Program(other, other, module=READER, **run.environment) as program,
    ):
        assert program.call("compare", 1, 1) == 0
        run.settle()
        assert not run.supervisor.has_served


@needs_llama
def test_an_image_is_refused_without_the_library_and_by_a_program_that_reads_it(form: Form) -> None:
    with supervised(form("qwen3moe", "pack"), memory=1 << 30) as run:
        path = Path(run.supervisor.model_path)
        with open_model([form("qwen3moe", "pack")]) as pack:
            header = lay_out(pack, mmap.PAGESIZE).header
        assert path.read_bytes() == header + b"\0"
        for program in (Program(path), run.program("--load", "NONE")):
            assert program.result() is None
            assert program.process.wait(60) == 1


@needs_llama
def test_a_program_that_checks_all_tensors_gets_right_ones(form: Form) -> None:
    with supervised(form("qwen3moe", "pack"), memory="floor", micro_batch=512) as run:
        with run.program("--check-tensors") as program:
            assert isinstance(program.ask([1]), list)
        assert run.supervisor.usage.fault_count > 0


@needs_llama
def test_what_lies_around_an_expert_of_a_gguf_is_not_read_with_it(form: Form) -> None:
    """Pages at its edges are the file's own; dense tensors are read ahead as ever."""
    gguf = form("qwen3moe", "gguf")
    with supervised(gguf, memory="floor", micro_batch=1) as run, run.program() as program:
        is_random = dict(_mapped_pages(program.process.pid))
    with open_model([gguf]) as pack:
        dense = {
            (str(tensor.path.resolve()), page)
            for tensor in pack.dense()
            for page in _pages(tensor.offset, tensor.length)
        }
        parts = [pack.locate(0, 3, kind.name) for kind in pack.parts(0)]
        edges = {
            (str(part.path.resolve()), page)
            for part in parts
            for page in (_pages(part.offset, part.length)[0], _pages(part.offset, part.length)[-1])
        }
    assert {is_random[page] for page in edges - dense} == {True}
    assert {is_random[page] for page in dense} == {False}


def _pages(offset: int, length: int) -> range:
    return range(offset // PAGE, (offset + length - 1) // PAGE + 1)


def _mapped_pages(process: int) -> Iterator[tuple[tuple[str, int], bool]]:
    """Yield the pages of GGUFs that a process maps, and whether each is read alone (smaps)."""
    page: tuple[str, int] = ("", 0)
    count = 0
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(word, 16) for word in words[0].split("-"))
            page, count = (words[-1], int(words[2], 16) // PAGE), (end - start) // PAGE
        elif words[0] == "VmFlags:" and page[0].endswith(".gguf"):
            yield from (((page[0], page[1] + number), "rr" in words) for number in range(count))
