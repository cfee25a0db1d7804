"""A recording in a process whose experts are brought is the one that needs all of the model."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.errors import MachineError, MoepackError, PackError, RequestError, SourceError
from moepack.packing.opening import open_model
from moepack.packing.shard_index import index_model
from moepack.trace.model import Tokens
from moepack.trace.recording.paged import PagedRecorder
from moepack.trace.recording.recorder import Recorder
from moepack.trace.recording.recording import record_trace
from tests.support.children import PATIENCE
from tests.support.models import FIXTURES, REAL_MODELS, first_shard, flip, shards_of
from tests.support.needs import needs_llama
from tests.support.recordings import PROMPTS

pytestmark = [pytest.mark.long, needs_llama]

OPTIONS: dict[str, Any] = {"context": 64, "threads": 1, "tokens": 8}


def record(model: Path | str, target: Path, **options: Any) -> bytes:
    record_trace(model, PROMPTS, target, **OPTIONS, **options)
    return target.read_bytes()


@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_trace_is_the_one_that_is_recorded_without_repacking(
    model: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    shards = shards_of(model)
    index_model(shards[0], tmp_path / "index")
    expected = record(shards[0], tmp_path / "alone", repack=False)
    assert record(shards[-1], tmp_path / "gguf", memory="floor") == expected
    assert record(packs[model], tmp_path / "pack", memory="floor") == expected
    assert record(packs[model], tmp_path / "free") == expected
    assert record(tmp_path / "index", tmp_path / "lain", memory="1GiB") == expected


def test_experts_come_and_go_while_it_records(packs: dict[str, Path]) -> None:
    with (
        open_model(packs["qwen3moe"]) as pack,
        PagedRecorder(pack, "floor", context_length=64, threads=1) as recorder,
        Recorder(str(first_shard("qwen3moe")), context_length=64, threads=1) as whole,
    ):
        for prompt in PROMPTS:
            tokens = recorder.tokenize(prompt)
            assert tokens == whole.tokenize(prompt)
            assert sum(len(piece.request) for piece in recorder.generate(tokens, 4)) > 4
        usage = recorder.pager.usage
    assert usage.miss_count > 2 * 16, "none came twice"
    assert usage.fault_count == 0


def stopping(monkeypatch: pytest.MonkeyPatch, stop: Any, request: int = 1) -> None:
    """Have something happen within a request."""
    generate = PagedRecorder.generate

    def stopped(
        self: PagedRecorder, prompt: Sequence[int], count: int, **options: Any
    ) -> Iterator[Tokens]:
        for number, piece in enumerate(generate(self, prompt, count, **options)):
            if (options["request"], number) == (request, 2):
                stop(self)
            yield piece

    monkeypatch.setattr(PagedRecorder, "generate", stopped)


def interrupt(_: PagedRecorder) -> None:
    raise KeyboardInterrupt


def kill(recorder: PagedRecorder) -> None:
    os.kill(recorder._process.pid, signal.SIGKILL)
    recorder._process.wait()


@pytest.mark.parametrize(
    ("stop", "error", "words"),
    [(interrupt, KeyboardInterrupt, None), (kill, MachineError, "ended by SIGKILL")],
)
def test_what_was_finished_is_kept_and_the_rest_is_recorded_later(
    stop: Any, error: type[BaseException], words: str | None, tmp_path: Path
) -> None:
    model = first_shard("qwen3moe")
    expected = record(model, tmp_path / "whole", memory="floor")
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, stop)
        with pytest.raises(error, match=words) as caught:
            record(model, tmp_path / "trace", memory="floor")
    assert "1 of 3 prompts are kept" in caught.value.__notes__[0]
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
        ({"memory": "floor", "context": 4}, RequestError, "prompt 1 does not fit"),
    ],
)
def test_what_is_no_option_is_refused(
    options: dict[str, Any], error: type[MoepackError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        record_trace(first_shard("qwen3moe"), PROMPTS, tmp_path / "trace", **{**OPTIONS, **options})
    assert not list(tmp_path.iterdir())


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"
    with pytest.raises(SourceError, match="no .*expert"):
        record(path, tmp_path / "trace", memory="floor")


def test_the_process_that_runs_the_model_ends_with_the_one_that_records(tmp_path: Path) -> None:
    prompts, target = tmp_path / "prompts.txt", tmp_path / "trace"
    prompts.write_text("Once upon a time\n" * 5000)
    command = [sys.executable, "-m", "moepack", "trace", "record", "--memory", "floor"]
    command += ["--model", str(first_shard("qwen3moe")), "--prompts", str(prompts)]
    piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*command, "-o", str(target)], **piped) as recording:
        deadline = time.monotonic() + PATIENCE
        partial = Path(f"{target}.partial")
        while not (partial.exists() and partial.stat().st_size > 4000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        recording.kill()
        output, _ = recording.communicate(timeout=PATIENCE)  # which the other one has open as well
    assert b"Traceback" not in output
    summary = moepack.import_trace([str(partial)], tmp_path / "copy")
    assert summary.request_count > 1
