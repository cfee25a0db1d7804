"""A recording with experts brought to a process is the same as with the whole model."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import MachineError, MoepackError, PackError, RequestError
from moepack.packing.shard_index import index_model
from moepack.running.recording.paged import PagedRecorder
from moepack.running.recording.recording import record_trace
from moepack.traces.model import Tokens
from tests.support.children import MOEPACK, PATIENCE, Piped, wait_until
from tests.support.models import first_shard, flip, shards_of
from tests.support.needs import needs_llama
from tests.support.recordings import PROMPTS

pytestmark = [pytest.mark.long, needs_llama]

OPTIONS: dict[str, Any] = {"context": 64, "threads": 1, "tokens": 8}


def record(model: Path | str, target: Path, **options: Any) -> bytes:
    record_trace(model, PROMPTS, target, **OPTIONS, **options)
    return target.read_bytes()


@pytest.mark.parametrize("model", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_a_trace_is_the_one_that_is_recorded_without_repacking(
    model: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    shards = shards_of(model)
    expected = record(shards[0], tmp_path / "alone", repack=False)
    assert record(packs[model], tmp_path / "pack", memory="floor") == expected
    if model == "qwen3moe":
        index_model(shards[0], tmp_path / "index")
        assert record(shards[-1], tmp_path / "gguf", memory="floor") == expected
        assert record(packs[model], tmp_path / "free") == expected
        assert record(tmp_path / "index", tmp_path / "lain", memory="1GiB") == expected


def kill_in(monkeypatch: pytest.MonkeyPatch, request: int) -> None:
    """Have the process that runs the model killed within a request."""
    generate = PagedRecorder.generate

    def stopped(
        self: PagedRecorder, prompt: Sequence[int], count: int, **options: Any
    ) -> Iterator[Tokens]:
        for number, piece in enumerate(generate(self, prompt, count, **options)):
            if (options["request"], number) == (request, 2):
                os.kill(self._process.pid, signal.SIGKILL)
                self._process.wait()
            yield piece

    monkeypatch.setattr(PagedRecorder, "generate", stopped)


def test_finished_prompts_are_kept_and_the_rest_is_recorded_later(tmp_path: Path) -> None:
    model = first_shard("qwen3moe")
    expected = record(model, tmp_path / "whole", memory="floor")
    for kept in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            kill_in(patch, request=kept)
            with pytest.raises(MachineError, match="ended by SIGKILL") as caught:
                record(model, tmp_path / "trace", memory="floor", resume=True)
        assert f"{kept} of 3 prompts are kept" in caught.value.__notes__[0]
    assert record(model, tmp_path / "trace", memory="floor", resume=True) == expected


def test_damaged_experts_are_named_and_the_recorder_can_be_used_again(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        for expert in range(pack.expert_count(1)):
            place = pack.locate(1, expert)
            flip(place.path, place.offset + 1000)
        with PagedRecorder(pack, "floor", context_length=64, threads=1) as recorder:
            for _ in range(2):
                with pytest.raises(PackError, match="layer 1 expert"):
                    list(recorder.generate(list(range(3, 60)), 3))
            assert recorder.tokenize(PROMPTS[0])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": "100KiB"}, RequestError, "too little memory"),
        ({"memory": "much"}, RequestError, "memory: not a size"),
        ({"memory": "floor", "temperature": -1}, RequestError, "temperature out of bounds"),
    ],
)
def test_what_is_no_option_is_refused(
    options: dict[str, Any], error: type[MoepackError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        record_trace(first_shard("qwen3moe"), PROMPTS, tmp_path / "trace", **{**OPTIONS, **options})
    assert not list(tmp_path.iterdir())


def test_the_process_that_runs_the_model_ends_with_the_one_that_records(tmp_path: Path) -> None:
    prompts, target = tmp_path / "prompts.txt", tmp_path / "trace"
    prompts.write_text("Once upon a time\n" * 500)
    command = (*MOEPACK, "trace", "record", "--memory", "floor", "--prompts", prompts, "-o", target)
    model = ("--model", first_shard("qwen3moe"))
    with Piped(*command, *model, stderr=subprocess.STDOUT) as recording:
        partial = Path(f"{target}.partial")
        wait_until(lambda: partial.exists() and partial.stat().st_size > 4000)
        recording.kill()
        output, _ = recording.communicate(timeout=PATIENCE)  # which the other one has open as well
    assert "Traceback" not in output
    summary = moepack.import_trace([str(partial)], tmp_path / "copy")
    assert summary.request_count > 1
