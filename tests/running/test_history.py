"""Windows that move on, and states: what is kept of a sequence, and going back in it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.llama_cpp.sampling import Sampling
from moepack.running.chat import Message
from moepack.running.context import BufferLengths
from moepack.running.engine import Engine, EngineOptions
from moepack.running.model import Model
from tests.support import architectures, llama_cpp
from tests.support.chat_model import write_chat_model
from tests.support.needs import needs_llama
from tests.support.runs import engine_of

pytestmark = needs_llama

CONTEXT = 1024
LEAST = EngineOptions(memory="floor", context=CONTEXT, threads=1)
ROOMY = LEAST._replace(memory=None)
PROMPT = [(7 * n) % 200 + 3 for n in range(40)]
ANSWER = [(11 * n) % 200 + 3 for n in range(300)]
"""Of more tokens than windows of the least batches keep."""
LONG_ANSWER = [(11 * n) % 200 + 3 for n in range(800)]
"""Of more tokens than windows keep."""
QUESTION = [(13 * n) % 200 + 3 for n in range(20)]

WINDOWS = ["cohere2moe", "gemma4", "gpt-oss", "mimo2"]
STATES = ["deepseek4", "jamba", "lfm2moe", "qwen4exp"]
"""The first has windows and states."""


def answered(engine: Engine) -> Any:
    """Go on with the question; return the logits behind it."""
    engine.feed(QUESTION)
    return engine.logits()


@pytest.mark.parametrize("model", ["gemma4", "gpt-oss"])
def test_windows_that_move_on_give_the_logits_of_the_loaded_model(
    model: str, tmp_path: Path
) -> None:
    batches = [ANSWER, *([token] for token in QUESTION)]
    with engine_of(model, tmp_path, LEAST) as engine:
        found = []
        for batch in batches:
            engine.feed(batch)
            found.append(engine.logits())
        batch_count = engine.batch_count
    expected = llama_cpp.stepwise_logits(
        tmp_path / "m.gguf", batches, context=CONTEXT, batch_count=batch_count, threads=1
    )
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("model", [*WINDOWS, *STATES])
def test_a_checkpoint_is_gone_back_to_from_any_distance(model: str, tmp_path: Path) -> None:
    with engine_of(model, tmp_path, ROOMY) as engine:
        engine.feed(PROMPT)
        right = answered(engine)
        engine.rewind(0)
        engine.feed(PROMPT)
        engine.save_checkpoint()
        engine.feed(LONG_ANSWER)
        engine.rewind(len(PROMPT))
        assert engine.tokens == PROMPT
        assert np.array_equal(answered(engine), right)
        engine.rewind(len(PROMPT))
        assert engine.tokens == PROMPT, "it is good for more than once"
        assert np.array_equal(answered(engine), right)


@pytest.mark.parametrize("model", [*WINDOWS, *STATES])
def test_without_one_all_is_forgotten_rather_than_gone_on_with_a_hole(
    model: str, tmp_path: Path
) -> None:
    with engine_of(model, tmp_path, ROOMY) as engine:
        engine.feed(PROMPT)
        engine.feed(LONG_ANSWER)
        engine.rewind(len(PROMPT))
        assert not engine.tokens
        engine.feed(PROMPT)
        right = answered(engine)
        engine.rewind(0)
        engine.feed(PROMPT)
        assert np.array_equal(answered(engine), right)


@pytest.mark.parametrize("model", [*WINDOWS, *STATES])
def test_a_checkpoint_of_other_tokens_is_not_gone_back_to(model: str, tmp_path: Path) -> None:
    with engine_of(model, tmp_path, ROOMY) as engine:
        engine.feed(PROMPT)
        engine.save_checkpoint()
        engine.rewind(10)
        del engine.tokens[10:]  # of states nothing is left
        engine.feed(ANSWER[: len(PROMPT)])
        engine.feed(LONG_ANSWER)
        engine.rewind(len(PROMPT))
        assert not engine.tokens


@pytest.mark.parametrize("model", WINDOWS)
def test_a_little_way_back_needs_no_checkpoint(model: str, tmp_path: Path) -> None:
    with engine_of(model, tmp_path, ROOMY) as engine:
        engine.feed(PROMPT)
        engine.feed(LONG_ANSWER)
        engine.rewind(len(PROMPT) + 700)
        assert engine.tokens == [*PROMPT, *LONG_ANSWER[:700]]


@pytest.mark.parametrize("model", WINDOWS)
def test_the_last_token_of_a_prompt_can_be_computed_again(model: str, tmp_path: Path) -> None:
    """As another answer to the same prompt needs it."""
    with engine_of(model, tmp_path, ROOMY) as engine:
        engine.feed(PROMPT)
        engine.save_checkpoint()
        engine.feed(LONG_ANSWER)
        engine.rewind(len(PROMPT) - 1)
        assert engine.tokens == PROMPT[:-1]


@pytest.mark.parametrize("model", [*WINDOWS, *STATES])
def test_a_checkpoint_is_as_long_as_was_planned(model: str, tmp_path: Path) -> None:
    with engine_of(model, tmp_path, ROOMY) as engine:
        planned = engine.checkpoint_length
        engine.feed(LONG_ANSWER)
        engine.save_checkpoint()
        checkpoint = engine._history._checkpoint
        assert checkpoint is not None
        # Beside keys, values and states is what says which tokens they are of: 12 bytes for each.
        assert 0 <= len(checkpoint.data) - planned < 1024


def test_where_nothing_is_forgotten_there_is_no_checkpoint(tmp_path: Path) -> None:
    for model in ("qwen3moe", "llama4"):  # whose window is longer than this context
        folder = tmp_path / model
        folder.mkdir()
        with engine_of(model, folder, ROOMY) as engine:
            assert engine.checkpoint_length == 0
            engine.feed(PROMPT)
            engine.save_checkpoint()
            assert engine._history._checkpoint is None
            engine.feed(ANSWER)
            engine.rewind(len(PROMPT))
            assert engine.tokens == PROMPT


THINKING = (
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant><think>{%- endif -%}"
)
"""A template that begins each answer with a thought, and shows none of those that were given."""
GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize("model", ["gpt-oss", "granite"])
def test_a_chat_that_goes_on_computes_nothing_again(model: str, tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "chat.gguf", THINKING, model=model)
    messages = [Message("user", "Where does the sea begin?")]
    stable_count = 0
    with Model(path, memory="floor", context=CONTEXT, threads=1) as chat:
        for turn in range(3):
            generation = chat.chat(messages, count=140, sampling=GREEDY)
            for _ in generation:
                pass
            facts = generation.facts
            assert facts.kept_count == stable_count, "all that the template wrote before"
            assert facts.prompt.step_count == facts.prompt_count - stable_count
            before, stable_count = (
                stable_count,
                chat._stable_count(messages, chat._chat_tokens(messages)),
            )
            assert before < stable_count < facts.prompt_count, "where the thought begins"
            messages += [Message("assistant", "By the river."), Message("user", f"And {turn}?")]


def taken_length(lines: list[str]) -> float:
    """Return the bytes of keys, values and states that llama.cpp says it has allocated."""
    return sum(float(match[1]) * (1 << 20) for match in map(TAKEN.search, lines) if match)


TAKEN = re.compile(r"(?:KV|RS|state) buffer size = *([\d.]+) MiB")


@pytest.mark.parametrize("context", [512, 8192])
@pytest.mark.parametrize("model", ["granite", "qwen3moe", *WINDOWS, *STATES])
def test_what_is_said_of_a_context_is_what_llama_cpp_takes(
    model: str,
    context: int,
    packs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = packs.get(model, tmp_path / "index")
    if model not in packs:
        moepack.index_model(architectures.write(model, tmp_path / "m.gguf"), pack)
    lines: list[str] = []
    heard = BufferLengths.heard

    def hear(self: BufferLengths, line: str) -> None:
        lines.append(line)
        heard(self, line)

    monkeypatch.setattr(BufferLengths, "heard", hear)
    (device,) = moepack.place(pack, memory=1 << 30, margin=0, context=context).devices
    with (
        moepack.open(pack) as opened,
        Engine(opened, EngineOptions(context=context, threads=1)) as engine,
    ):
        assert taken_length(lines) > 0
        taken = taken_length(lines) + engine.checkpoint_length
        assert engine.memory.context >= taken
    # Its log rounds each length to a hundredth of a MiB.
    rounding = 0.005 * (1 << 20) * sum(map(bool, map(TAKEN.search, lines)))
    assert device.context_length == pytest.approx(taken, abs=rounding + 1)
