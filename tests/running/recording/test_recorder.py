"""A real llama.cpp is watched while it runs real models: a recording has its own counts."""

import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from moepack.common import extras
from moepack.common.errors import MachineError, RequestError, SourceError
from moepack.running.llama_cpp import structs
from moepack.running.llama_cpp.library import VERSION, load
from moepack.running.recording import recorder as recorder_module
from moepack.running.recording import recording
from moepack.running.recording.recorder import Recorder
from moepack.traces.file_records import join
from moepack.traces.model import Phase, Tokens
from tests.support import architectures
from tests.support.chat_model import begin_copy, finish
from tests.support.interruptions import before_each
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_llama
from tests.support.own_groups import lay_groups
from tests.support.recordings import PROMPTS, larger_than_memory, read_recording, record_to

pytestmark = needs_llama

IMATRICES = {
    "qwen3moe": "qwen3moe-Q4_K_M-imatrix-prompt.gguf",
    "deepseek2": "deepseek2-v3-IQ4_XS-imatrix-prompt.gguf",
    "gpt-oss": "gpt-oss-mxfp4-native-imatrix-prompt.gguf",
    "granite": "granite-swa-Q4_K_M-imatrix-prompt.gguf",
    "mixtral": "mixtral-Q4_K_M-imatrix-prompt.gguf",
}
CHUNK_COUNT, CHUNK_TOKENS = 4, 64
TEXT = (FIXTURES / "prompt.txt").read_text()


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    """Load qwen3moe once, with a context of 64 tokens."""
    with Recorder(str(first_shard("qwen3moe")), context_length=64, threads=1) as opened:
        yield opened


def equal(one: Tokens, other: Tokens) -> bool:
    pairs: zip[Any] = zip(one, other, strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


# What is recorded


@pytest.mark.parametrize("model", IMATRICES)
def test_what_is_recorded_is_what_llama_imatrix_counted(model: str) -> None:
    with Recorder(str(first_shard(model)), context_length=CHUNK_TOKENS, threads=1) as opened:
        begin, tokens, pieces = opened.tokenize(""), opened.tokenize(TEXT), []
        for number in range(CHUNK_COUNT):
            chunk = tokens[number * CHUNK_TOKENS :][:CHUNK_TOKENS]
            pieces.append(opened.prefill(begin + chunk[len(begin) :], request=number))
    recorded = join(pieces)
    counts = {
        layer: np.bincount(recorded.expert[recorded.layer == layer], minlength=count).tolist()
        for layer, count in opened.expert_counts.items()
    }
    expected = {
        int(tensor.name.split(".")[1]): tensor.data.ravel().astype(int).tolist()
        for tensor in GGUFReader(FIXTURES / IMATRICES[model]).tensors
        if tensor.name.endswith("ffn_down_exps.weight.counts")
    }
    assert counts == expected
    assert all(sum(layer) for layer in counts.values())


def test_a_model_larger_than_memory_is_recorded_without_a_copy_of_its_weights(
    tmp_path: Path,
) -> None:
    """Its copy would get this process killed."""
    path = larger_than_memory(tmp_path / "model.gguf")
    with pytest.raises(MachineError, match="does not fit into memory") as caught:
        Recorder(str(path))
    assert "`repack=False`" in (caught.value.hint or "")
    with pytest.raises(MachineError, match="llama.cpp cannot load the model"):
        Recorder(str(path), repack=False)


def test_a_model_larger_than_its_control_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_groups(tmp_path, "0::/a", {"a/memory.max": str(1 << 20)}, monkeypatch)
    with pytest.raises(MachineError, match="into memory.*expected up to 1.0 MiB"):
        Recorder(str(first_shard("qwen3moe")))


def test_each_token_has_the_choices_of_its_own(recorder: Recorder) -> None:
    """A token's experts do not depend on later tokens: those of a prefix are a prefix.

    Of less than 64 tokens: from there on flash attention takes another way, and rounds otherwise.
    """
    tokens = recorder.tokenize(TEXT)[:60]
    whole, part = recorder.prefill(tokens), recorder.prefill(tokens[:48])
    end = part.starts[-1]
    assert np.array_equal(whole.starts[:49], part.starts)
    assert np.array_equal(whole.layer[:end], part.layer)
    assert np.array_equal(whole.expert[:end], part.expert)
    assert part.layer.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 48
    each = whole.expert.reshape(-1, 4)
    assert all(len(set(row)) == 4 for row in each.tolist())


def test_a_prompt_of_many_batches_is_recorded_whole(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = recorder.tokenize(TEXT)[:60]
    whole = recorder.prefill(tokens, request=3)
    monkeypatch.setattr("moepack.running.recording.recorder.BATCH_COUNT", 16)
    assert equal(recorder.prefill(tokens, request=3), whole)
    assert whole.request.tolist() == [3] * 60


def test_a_vocabulary_that_adds_bos_has_it_in_front(tmp_path: Path) -> None:
    for number, value in enumerate((False, True)):
        path = tmp_path / f"{number}.gguf"
        writer = begin_copy(path)
        writer.add_bool("tokenizer.ggml.add_bos_token", value)
        finish(writer)
        with Recorder(str(path), context_length=64) as opened:
            tokens = opened.tokenize("a kitchen")
            assert opened.tokenize("") == ([1] if value else [])
            assert (tokens[0] == 1) == value


def test_of_two_routers_in_a_layer_the_first_is_taken(tmp_path: Path) -> None:
    """Grovemoe routes twice in each layer under one name, and copies the selection."""
    path = architectures.write("grovemoe", tmp_path / "grove.gguf")
    with Recorder(str(path), context_length=64) as opened:
        tokens = opened.prefill([5, 6, 7])
    assert tokens.layer.tolist() == [0, 0, 1, 1, 2, 2] * 3
    assert tokens.expert.max() > 3, "not those that others share"


# Generation


def test_generation_ends_where_the_context_is_full(recorder: Recorder) -> None:
    prompt = recorder.tokenize(TEXT)[:50]
    pieces = list(recorder.generate(prompt, 100))
    assert [len(piece.request) for piece in pieces] == [50] + [1] * 14
    assert {int(piece.phase[0]) for piece in pieces[1:]} == {Phase.DECODE}
    assert pieces[0].phase.tolist() == [Phase.PREFILL] * 50
    assert [len(p.request) for p in recorder.generate(prompt, 3)] == [50, 1, 1, 1]
    assert len(list(recorder.generate(recorder.tokenize(TEXT)[:64], 3))) == 1


def test_the_same_seed_generates_the_same_again(recorder: Recorder) -> None:
    def run(temperature: float, seed: int) -> Tokens:
        return join(list(recorder.generate([5, 6, 7], 40, temperature=temperature, seed=seed)))

    assert equal(run(0.8, 1), run(0.8, 1))
    assert equal(run(0, 1), run(0, 2))
    assert not equal(run(0.8, 1), run(0.8, 2))


# What may go wrong


def test_a_pruned_layer_is_noticed_and_not_counted_too_low(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_only(count: int, *, token: int, logits: int) -> structs.DecodeBatch:
        ctypes.memset(logits, 0, count - 1)
        return structs.DecodeBatch(count, token=token, logits=logits)

    with monkeypatch.context() as patch:  # it comes up in a callback of C's
        patch.setattr(recorder_module, "DecodeBatch", last_only)
        with pytest.raises(MachineError, match="layer 1: the router did not run for each token"):
            recorder.prefill([5, 6, 7])
    assert len(recorder.prefill([5, 6, 7]).request) == 3


def test_what_llama_cannot_decode_is_an_error_and_the_next_prompt_works(recorder: Recorder) -> None:
    expected = recorder.prefill([5, 6, 7])
    words = r"of-\d+.gguf: llama.cpp cannot decode \(status 1\)"
    with pytest.raises(MachineError, match=words):
        join([recorder._decode([5] * 64, 0, Phase.DECODE) for _ in range(100)])
    assert equal(recorder.prefill([5, 6, 7]), expected)


def test_an_interruption_at_any_moment_is_never_dropped(
    recorder: Recorder, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python would drop it where it came up between C and the first line of a callback."""
    expected = recorder.prefill([5, 6, 7])
    for number in range(10):
        timer = threading.Timer(0.002 * number, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run_until_interrupted(recorder, timer)
    assert equal(recorder.prefill([5, 6, 7]), expected)
    assert capfd.readouterr() == ("", "")


def run_until_interrupted(recorder: Recorder, timer: threading.Timer) -> None:
    timer.start()
    for _ in range(500):
        recorder.prefill(range(3, 63))


def test_a_text_that_llama_would_end_the_process_for_is_refused(recorder: Recorder) -> None:
    with pytest.raises(RequestError, match="a text that is too long"):
        recorder.tokenize("a" * ((1 << 26) + 1))


def test_missing_routers_and_unknown_experts_are_noticed(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "expert_counts", {0: 16, 1: 16, 2: 16})
        with pytest.raises(MachineError, match="other layers"):
            recorder.prefill([5, 6, 7])
        patch.setattr(recorder, "expert_counts", {0: 16, 1: 4})
        with pytest.raises(MachineError, match="an unknown expert"):
            recorder.prefill(list(range(5, 60)))


def test_what_llama_refuses_is_told_in_its_own_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    finish(begin_copy(path, without="output_norm.weight"))
    with pytest.raises(MachineError, match="llama.cpp cannot load the model: .*output_norm.weight"):
        Recorder(str(path))
    assert capfd.readouterr() == ("", "")


def test_a_model_without_vocabulary_is_refused(tmp_path: Path) -> None:
    writer = begin_copy(tmp_path / "model.gguf")
    values = writer.kv_data[0]
    for key in [key for key in values if key.startswith("tokenizer.")]:
        del values[key]
    writer.add_string("tokenizer.ggml.model", "none")
    writer.add_uint32("qwen3moe.vocab_size", 512)
    finish(writer)
    with pytest.raises(SourceError, match="no vocabulary"):
        Recorder(str(tmp_path / "model.gguf"))


def test_llamas_log_is_given_back() -> None:
    library = load()

    def log() -> tuple[int | None, int | None]:
        holders = ctypes.c_void_p(), ctypes.c_void_p()
        library.llama_log_get(*map(ctypes.addressof, holders))
        return holders[0].value, holders[1].value

    before = log()
    with Recorder(str(first_shard("granite")), context_length=64):
        assert log() != before
    assert log() == before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"context": 0}, "context length out of bounds"),
        ({"threads": 0}, "threads out of bounds"),
        ({"temperature": float("nan")}, "temperature out of bounds"),
        ({"seed": 0xFFFFFFFF}, "seed out of bounds"),
    ],
)
def test_options_out_of_bounds_are_refused(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=problem):
        record_to(tmp_path / "trace", **options)


@pytest.mark.parametrize("tokens", [[], [0] * 65, [-1], [1 << 20]])
def test_tokens_that_cannot_be_decoded_are_refused(recorder: Recorder, tokens: list[int]) -> None:
    with pytest.raises(RequestError):
        recorder.prefill(tokens)


def test_a_closed_recorder_says_so_and_does_not_reach_into_freed_memory() -> None:
    with Recorder(str(first_shard("granite")), context_length=64) as opened:
        pieces = opened.generate([5, 6, 7], 10)
        next(pieces)
    for call in (lambda: next(pieces), lambda: opened.prefill([5]), lambda: opened.tokenize("a")):
        with pytest.raises(RequestError, match="closed"):
            call()
    opened.close()


# The library


def test_without_the_exact_wheel_the_hint_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2025.1.1")
    with pytest.raises(MachineError, match=f"version: 2025.1.1, not {VERSION}") as caught:
        load.__wrapped__()
    assert caught.value.hint == extras.hint("record")


def test_without_openmp_the_hint_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(MachineError, match="cannot be loaded: libgomp") as caught:
        load.__wrapped__()
    assert caught.value.hint == "apt-get install libgomp1"


def test_a_library_with_other_layouts_is_refused() -> None:
    library = load()

    class Other:
        def __init__(self, **functions: Any) -> None:
            self.functions = functions

        def __getattr__(self, name: str) -> Any:
            return self.functions.get(name) or getattr(library, name)

    params = library.llama_context_default_params()
    params.type_k = 0
    for other in (
        Other(llama_context_default_params=lambda: params),
        Other(ggml_tensor_overhead=lambda: library.ggml_tensor_overhead() + 8),
        Other(ggml_set_name=lambda *_: None),
        Other(ggml_nbytes=lambda _: 0),
    ):
        with pytest.raises(MachineError, match="another layout"):
            structs.check_layouts(other)
    structs.check_layouts(Other())


# The trace file


def test_each_prompt_is_a_request_of_prefill_and_decode(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    summary = record_to(tmp_path / "trace", progress=lambda *call: calls.append(call))
    origin, tokens = read_recording(tmp_path / "trace")
    name = first_shard("qwen3moe").name
    assert (origin.format, origin.name, origin.model) == ("recorded", name, "Qwen3Moe")
    assert (origin.expert_counts, origin.experts_used) == ({0: 16, 1: 16}, 4)
    with Recorder(str(first_shard("qwen3moe")), context_length=64) as opened:
        lengths = [len(opened.tokenize(prompt)) for prompt in PROMPTS]
    for number, length in enumerate(lengths):
        phases = tokens.phase[tokens.request == number].tolist()
        assert phases[:length] == [Phase.PREFILL] * length
        assert set(phases[length:]) <= {Phase.DECODE}
    assert summary.request_count == 3
    assert int(np.count_nonzero(tokens.phase == Phase.PREFILL)) == sum(lengths)
    assert summary.token_count == len(tokens.request)
    assert summary.selection_count == len(tokens.expert) == 8 * len(tokens.request)
    assert calls[0] == (lengths[0], sum(lengths) + 3 * 8)
    assert calls[1][0] == 1
    assert sum(count for count, _ in calls) == summary.token_count == calls[-1][1]


def test_answers_that_end_early_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    ends = itertools.cycle([False, False, False, True])
    monkeypatch.setattr(load(), "llama_vocab_is_eog", lambda *_: next(ends))
    summary = record_to(tmp_path / "trace", progress=lambda *call: calls.append(call))
    assert sum(count for count, _ in calls) == summary.token_count == calls[-1][1]
    assert calls[0][1] == summary.token_count + 3 * 5


def test_a_prompt_that_is_too_long_is_named_before_anything_is_run(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with pytest.raises(RequestError, match=r"prompt 2 .* 1 to 64 tokens, found 1,\d\d\d"):
        record_to(tmp_path / "trace", ["short", TEXT], progress=lambda *call: calls.append(call))
    assert not calls
    assert not list(tmp_path.iterdir())


def stop_at(monkeypatch: pytest.MonkeyPatch, request: int) -> None:
    """Interrupt a recording within the answer to a prompt."""

    def stop(_: str, recorder: Recorder, tokens: Sequence[int], number: int, phase: Phase) -> None:
        if number == request and len(tokens) == 1:
            raise KeyboardInterrupt

    before_each(monkeypatch, stop, (Recorder, "_decode"))


@pytest.mark.parametrize("before", [False, True])
def test_an_interrupted_recording_goes_on_with_the_prompts_that_are_missing(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bytes of one that was not interrupted, behind another recording too."""
    path, whole = tmp_path / "trace", tmp_path / "whole"
    for target in (path, whole):
        if before:
            record_to(target, PROMPTS[1:], seed=7)
    record_to(whole, append=before)
    for request in (1, 2):
        with monkeypatch.context() as patch:
            stop_at(patch, request)
            append = before and request == 1
            with pytest.raises(KeyboardInterrupt) as caught:
                record_to(path, append=append, resume=not append)
        assert caught.value.__notes__ == [
            f"{request} of 3 prompts are kept in {path}; `resume=True` records the others"
        ]
        assert path.exists()
    calls: list[tuple[int, int]] = []
    summary = record_to(path, resume=True, progress=lambda *call: calls.append(call))
    assert summary.added.request_count == 1
    assert summary.request_count == 3 + 2 * before
    assert sum(count for count, _ in calls) == summary.added.token_count
    assert path.read_bytes() == whole.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(recording, "Recorder", None)  # nothing is missing: no model is loaded
        assert record_to(path, resume=True).added.request_count == 0
    assert path.read_bytes() == whole.read_bytes()


def test_another_recording_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record_to(path)
    before = path.read_bytes()
    options: dict[str, Any] = {
        "prompts": PROMPTS[:2],
        "seed": 1,
        "tokens": 9,
        "temperature": 0,
        "repack": False,
    }
    for name, value in options.items():
        with pytest.raises(RequestError, match="other prompts or options, or another") as caught:
            record_to(path, **{name: value}, resume=True)
        assert "`append=True`" in str(caught.value.hint)
    with pytest.raises(RequestError, match="exists already") as caught:
        record_to(path)
    assert "`resume=True` records the prompts that are missing" in str(caught.value.hint)
    with pytest.raises(RequestError, match="to append and to resume at once"):
        record_to(path, append=True, resume=True)
    assert path.read_bytes() == before
