"""Recordings and traces of programs are what a real llama.cpp computes, and outlive its end."""

import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

import moepack
from moepack.common.errors import MachineError, RequestError
from moepack.pack.opening.open_model import open_model
from moepack.packing.shard_index import index_model
from moepack.report import trace_text
from moepack.running.programs.trace_writer import TraceWriter
from moepack.running.serving import recording
from moepack.running.serving.model_server import ModelServer
from moepack.running.serving.recording import record_trace
from moepack.running.serving.run_facts import measure
from moepack.running.serving.sampling import Sampling
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor
from moepack.traces.file_writer import Writer
from moepack.traces.model import Phase, Tokens, Unknown
from tests.support.children import MOEPACK, PATIENCE, Piped, wait_until
from tests.support.models import FIXTURES, first_shard, shards_of
from tests.support.needs import needs_llama
from tests.support.recordings import PROMPTS, read_recording, record_to
from tests.support.supervised import PROMPTS as ASKED
from tests.support.supervised import supervised

pytestmark = needs_llama

IMATRICES = {
    "qwen3moe": "qwen3moe-Q4_K_M-imatrix-prompt.gguf",
    "deepseek2": "deepseek2-v3-IQ4_XS-imatrix-prompt.gguf",
    "gpt-oss": "gpt-oss-mxfp4-native-imatrix-prompt.gguf",
    "granite": "granite-swa-Q4_K_M-imatrix-prompt.gguf",
    "mixtral": "mixtral-Q4_K_M-imatrix-prompt.gguf",
}
MODEL = first_shard("qwen3moe")
COUNT = 8
GREEDY = Sampling(temperature=0)
CHUNK_COUNT, CHUNK_TOKENS = 4, 64
TEXT = (FIXTURES / "prompt.txt").read_text()


@pytest.mark.parametrize("model", IMATRICES)
def test_what_is_recorded_is_what_llama_imatrix_counted(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last layer, of which a prompt has one token."""

    def chunks(server: ModelServer, *_: object) -> list[list[int]]:
        begin = server.client.tokenize("", special=True)
        tokens = server.client.tokenize(TEXT, special=True)
        starts = range(0, CHUNK_COUNT * CHUNK_TOKENS, CHUNK_TOKENS)
        return [begin + tokens[start:][:CHUNK_TOKENS][len(begin) :] for start in starts]

    monkeypatch.setattr(recording, "_tokenize", chunks)
    texts = ["a chunk"] * CHUNK_COUNT
    options: dict[str, Any] = {"context": 2 * CHUNK_TOKENS, "tokens": 0, "threads": 1}
    record_trace(first_shard(model), texts, tmp_path / "trace", **options)
    origin, tokens = read_recording(tmp_path / "trace")
    *layers, _ = sorted(origin.expert_counts or {})
    for tensor in GGUFReader(FIXTURES / IMATRICES[model]).tensors:
        if tensor.name in (f"blk.{layer}.ffn_down_exps.weight.counts" for layer in layers):
            layer, expected = int(tensor.name.split(".")[1]), tensor.data.ravel().astype(int)
            counts = np.bincount(tokens.expert[tokens.layer == layer], minlength=len(expected))
            assert counts.sum() == expected.sum() > 0
            # Its batches are others, and round otherwise.
            assert np.abs(counts - expected).sum() < 0.02 * expected.sum()


def test_each_prompt_is_a_request_of_prefill_and_decode(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    summary = record_to(tmp_path / "trace", progress=lambda *call: calls.append(call))
    origin, tokens = read_recording(tmp_path / "trace")
    name = first_shard("qwen3moe").name
    assert (origin.format, origin.name, origin.model) == ("recorded", name, "Qwen3Moe")
    assert (origin.expert_counts, origin.experts_used) == ({0: 16, 1: 16}, 4)
    assert not origin.unknown
    for number in range(3):
        phases = tokens.phase[tokens.request == number].tolist()
        assert phases[-8:] == [Phase.DECODE] * 8
        assert set(phases[:-8]) == {Phase.PREFILL}
    assert summary.request_count == 3
    assert summary.token_count == len(tokens.request)
    decoded_count = 3 * 8
    prompt_count = summary.token_count - decoded_count
    assert summary.selection_count == 4 * (prompt_count + 3) + 8 * decoded_count
    assert sum(count for count, _ in calls) == summary.token_count == calls[-1][1]


def test_every_form_of_a_model_and_any_memory_record_the_same(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    def recorded(named: Path, memory: str) -> bytes:
        target = tmp_path / "trace"
        options: dict[str, Any] = {"context": 64, "threads": 1, "tokens": 8, "force": True}
        record_trace(named, PROMPTS, target, memory=memory, **options)
        return target.read_bytes()

    expected = recorded(MODEL, "1GiB")
    index_model(MODEL, tmp_path / "index")
    for path in (packs["qwen3moe"], tmp_path / "index", Path(shards_of("qwen3moe")[-1])):
        assert recorded(path, "floor") == expected


def test_the_same_seed_records_the_same_and_no_tokens_are_asked_for_in_vain(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        record_to(tmp_path / name, seed=seed, tokens=200, context=40)
    traces = {name: read_recording(tmp_path / name)[1] for name in "abc"}
    assert np.array_equal(traces["a"].expert, traces["b"].expert)
    assert not np.array_equal(traces["a"].expert, traces["c"].expert)
    most = max(np.bincount(traces["a"].request))
    assert most in (39, 40), "until the context is full"


def stop_at(monkeypatch: pytest.MonkeyPatch, request: int, error: BaseException | None) -> None:
    """Stop a recording within the answer to a prompt: by an error, or by killing the server."""
    compute = recording._compute
    numbers = iter(range(10))

    def stopped(server: ModelServer, *arguments: Any) -> Any:
        number = next(numbers)
        if number == request and error is None:
            server._process.send_signal(signal.SIGKILL)
        for count in compute(server, *arguments):
            if number == request and error is not None:
                raise error
            yield count

    monkeypatch.setattr(recording, "_compute", stopped)


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_interrupted_recording_goes_on_with_the_prompts_that_are_missing(
    is_killed: bool, tmp_path: Path
) -> None:
    """To the bytes of one that was not interrupted."""
    path, whole = tmp_path / "trace", tmp_path / "whole"
    record_to(whole)
    error = None if is_killed else KeyboardInterrupt()
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, error)
        with pytest.raises(MachineError if is_killed else KeyboardInterrupt) as caught:
            record_to(path)
    assert caught.value.__notes__ == [
        f"1 of 3 prompts are kept in {path}; `resume=True` records the others"
    ]
    if is_killed:
        assert "ended by SIGKILL" in str(caught.value)
    calls: list[tuple[int, int]] = []
    summary = record_to(path, resume=True, progress=lambda *call: calls.append(call))
    assert summary.added.request_count == 2
    assert summary.request_count == 3
    assert sum(count for count, _ in calls) == summary.added.token_count
    assert path.read_bytes() == whole.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "ModelServer", None)  # nothing is missing: no model is loaded
        assert record_to(path, resume=True).added.request_count == 0
    assert path.read_bytes() == whole.read_bytes()


def test_another_recording_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record_to(path)
    before = path.read_bytes()
    options: dict[str, Any] = {"prompts": PROMPTS[:2], "seed": 1, "tokens": 9, "temperature": 0}
    for name, value in options.items():
        with pytest.raises(RequestError, match="other prompts or options, or another") as caught:
            record_to(path, **{name: value}, resume=True)
        assert "another file" in str(caught.value.hint)
    with pytest.raises(RequestError, match="exists already") as caught:
        record_to(path)
    assert "`resume=True` records the prompts that are missing" in str(caught.value.hint)
    with pytest.raises(RequestError, match="`force` and `resume` at once"):
        record_to(path, force=True, resume=True)
    assert path.read_bytes() == before


def test_a_prompt_that_is_too_long_is_named_before_anything_is_run(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with pytest.raises(RequestError, match=r"prompt 2 .* 1 to 64 tokens, found 1,\d\d\d"):
        record_to(tmp_path / "trace", ["short", TEXT], progress=lambda *call: calls.append(call))
    assert not calls
    assert not list(tmp_path.iterdir())


def test_the_process_that_runs_the_model_ends_with_the_one_that_records(tmp_path: Path) -> None:
    prompts, target = tmp_path / "prompts.txt", tmp_path / "trace"
    prompts.write_text("Once upon a time\n" * 500)
    command = (*MOEPACK, "trace", "record", "--memory", "floor", "--prompts", prompts, "-o", target)
    model = ("--model", first_shard("qwen3moe"))
    with Piped(*command, *model, stderr=subprocess.STDOUT) as process:
        partial = Path(f"{target}.partial")
        wait_until(lambda: partial.exists() and partial.stat().st_size > 4000)
        process.kill()
        output, _ = process.communicate(timeout=PATIENCE)  # which the other one has open as well
    assert "Traceback" not in output
    # It may have been killed between a request and the end of the file behind it.
    cut = moepack.ReadOptions(lenient=True)
    assert moepack.import_trace([str(partial)], tmp_path / "copy", options=cut).request_count > 1


def chosen_in(tokens: Tokens, layer: int) -> list[list[int]]:
    """Return the experts of each token in a layer."""
    pairs = zip(tokens.starts[:-1], tokens.starts[1:], strict=True)
    return [
        tokens.expert[start:end][tokens.layer[start:end] == layer].tolist() for start, end in pairs
    ]


@pytest.fixture
def pack() -> Iterator[moepack.Pack]:
    with open_model(MODEL) as one:
        yield one


def test_texts_that_are_answered_are_the_trace_of_a_recording(
    pack: moepack.Pack, tmp_path: Path
) -> None:
    with TraceWriter(tmp_path / "run", pack, has_requests=True) as trace:
        words = ["-c", "256", "-np", "1", "-t", "1", "--cache-ram", "0", "-b", "256", "-ub", "256"]
        with ModelServer(pack, StreamingOptions(), options=words, trace=trace) as server:
            complete = partial(server.client.complete, count=COUNT, sampling=GREEDY)
            for text in PROMPTS:
                with measure(server, partial(complete, text)) as answer:
                    list(answer)
    options: Any = {"tokens": COUNT - 1, "temperature": 0, "context": 256, "threads": 1}
    record_trace(MODEL, PROMPTS, tmp_path / "recorded", memory="floor", **options)
    origin, tokens = read_recording(tmp_path / "run")
    expected_origin, expected = read_recording(tmp_path / "recorded")
    assert (origin.name, origin.model) == (expected_origin.name, expected_origin.model)
    assert not origin.unknown
    assert tokens.request.tolist() == expected.request.tolist()
    assert tokens.phase.tolist() == expected.phase.tolist()
    for layer in (0, 1):
        assert chosen_in(tokens, layer) == chosen_in(expected, layer)


def test_a_prompt_ends_with_its_first_output_in_batches_of_any_length(
    pack: moepack.Pack, tmp_path: Path
) -> None:
    rows = np.arange(12, dtype=np.uint16).reshape(3, 4)
    steps = [{0: rows}, {0: rows[:1], 1: rows[:1]}, {0: rows[:1], 1: rows[:1]}]
    with TraceWriter(tmp_path / "trace", pack, has_requests=True) as trace:
        trace.write([(request, step) for request in (1, 2) for step in steps], 4)
    _, tokens = read_recording(tmp_path / "trace")
    assert tokens.phase.tolist() == 2 * [*4 * [Phase.PREFILL], Phase.DECODE]


@pytest.mark.parametrize(("count", "text"), [(1, "1 selection of a layer is"), (2000, "2,000 sel")])
def test_selections_that_a_trace_lacks_are_told(
    pack: moepack.Pack, tmp_path: Path, count: int, text: str
) -> None:
    rows = np.arange(4, dtype=np.uint16).reshape(1, 4)
    trace = TraceWriter(tmp_path / "trace", pack)
    trace.write([(1, {0: rows, 1: rows})], 4)
    trace.lost_count = count
    with pytest.warns(RuntimeWarning, match=f"trace: {text}"):
        trace.__exit__(None, None, None)
    assert len(read_recording(tmp_path / "trace")[1].layer) == 8


def test_selections_that_a_recording_lacks_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "lost_count", 3)
    summary = record_to(tmp_path / "trace")
    assert list(summary.warnings.values()) == [3]
    assert "left out: 3 × selection of a layer, which moepack was too busy" in trace_text.imported(
        summary
    )


@pytest.mark.parametrize("used", [2, 8])
def test_another_number_of_experts_counts_for_the_memory_and_in_the_trace(
    used: int, pack: moepack.Pack, tmp_path: Path
) -> None:
    floors: list[int] = []
    for more in ([], ["--override-kv", f"qwen3moe.expert_used_count=int:{used}"]):
        words = ["-c", "64", "-np", "1", "-t", "1", "--cache-ram", "0", "-b", "32", "-ub", "1"]
        path, options = tmp_path / f"trace{len(floors)}", StreamingOptions("floor")
        with (
            TraceWriter(path, pack) as trace,
            ModelServer(pack, options, options=[*words, *more], trace=trace) as server,
        ):
            list(server.client.complete("hello", count=COUNT, sampling=GREEDY))
            usage = server.usage
            floors.append(server.supervisor.floor)
        assert usage.resident_length <= usage.budget == floors[-1]
    assert floors[1] * 4 == floors[0] * used
    origin, tokens = read_recording(path)
    assert origin.experts_used == used
    assert {len(experts) for experts in chosen_in(tokens, 0)} == {used}


def test_of_several_texts_at_once_the_requests_are_unknown(
    pack: moepack.Pack, tmp_path: Path
) -> None:
    with (
        TraceWriter(tmp_path / "trace", pack) as trace,
        supervised(MODEL, memory="floor", micro_batch=32, records=True) as run,
    ):
        with run.program("--slots", 4, "--micro-batch", 32) as program:
            run.supervisor.pop_calls(with_open=True)  # with which the server tries its context
            for prompts in ASKED:
                program.ask(*prompts)
                trace.write(run.supervisor.pop_calls(), 4)
        trace.write(run.supervisor.pop_calls(with_open=True), 4)
    origin, tokens = read_recording(tmp_path / "trace")
    assert origin.unknown == {Unknown.REQUESTS}
    lengths = [len(prompt) for prompts in ASKED for prompt in prompts]
    assert len(tokens.request) == sum(length + COUNT - 1 for length in lengths)
    assert sum(map(len, chosen_in(tokens, 0))) == 4 * len(tokens.request)
    assert sum(map(len, chosen_in(tokens, 1))) == 4 * COUNT * len(lengths)
    assert set(tokens.phase.tolist()) == set(Phase)


def test_a_file_that_is_there_is_refused(pack: moepack.Pack, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("precious")
    with pytest.raises(RequestError, match="exists already") as refusal:
        TraceWriter(tmp_path / "trace", pack)
    assert "--force" not in (refusal.value.hint or "")
    assert (tmp_path / "trace").read_text() == "precious"


def test_a_trace_that_cannot_be_written_any_more_has_what_was_and_is_told_of(
    pack: moepack.Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Writer.keep

    def fail(self: Writer) -> None:
        raise MachineError("no space left", path=self.path)

    with (
        supervised(MODEL, memory="floor", micro_batch=32, records=True) as run,
        run.program("--micro-batch", 32) as program,
    ):
        run.supervisor.pop_calls(with_open=True)
        trace = TraceWriter(tmp_path / "trace", pack)
        for writes in (keep, fail, keep):
            monkeypatch.setattr(Writer, "keep", writes)
            assert isinstance(program.ask([7, 8, 9]), list), "the program goes on"
            trace.write(run.supervisor.pop_calls(with_open=True), 4)
        assert run.supervisor.pop_calls() == []
        with pytest.raises(MachineError, match="no space left"), trace:
            pass
    _, tokens = read_recording(tmp_path / "trace")
    assert len(tokens.request) == 3 + COUNT - 1
