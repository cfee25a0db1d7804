"""Texts and chats: what comes, where it ends, and that what was counted is what happened."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.caching import cache as caching
from moepack.errors import MachineError, RequestError, SourceError
from moepack.llama_cpp.sampling import Sampling
from moepack.running.chat import ChatTemplate, Message
from moepack.running.generation import Generation
from moepack.running.model import Model
from tests.support.chat_model import TEMPLATE, write_chat_model
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_llama

PROMPT = "Once upon a time"
GREEDY = Sampling(temperature=0)
SMALL: dict[str, Any] = {"memory": "floor", "context": 64, "threads": 1}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """Run qwen3moe from its shards, in the least memory."""
    with Model(first_shard("qwen3moe"), **SMALL) as opened:
        yield opened


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a template for chats."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "chat.gguf")


def text_of(generation: Generation) -> str:
    return "".join(generation)


@needs_llama
def test_a_text_comes_in_pieces_and_ends_where_it_was_asked_to(model: Model) -> None:
    generation = model.generate(PROMPT, count=9, sampling=GREEDY)
    with pytest.raises(RequestError, match="has not ended"):
        generation.facts  # noqa: B018
    pieces = list(generation)
    facts = generation.facts
    assert len(pieces) > 1
    assert "".join(pieces) == generation.text == facts.text
    assert (facts.token_count, facts.step_count, facts.end) == (9, 8, "length")
    assert facts.prompt.step_count + facts.kept_count == facts.prompt_count
    assert facts.hits + facts.misses == 8 * 2 * 4, "8 steps, 2 layers, 4 experts"
    assert facts.tokens_per_second == pytest.approx(8 / facts.seconds)
    assert text_of(model.generate(PROMPT, count=9, sampling=GREEDY)) == facts.text


@needs_llama
def test_the_same_seed_gives_the_same_text_and_another_another(model: Model) -> None:
    texts = [
        text_of(model.generate(PROMPT, count=20, sampling=Sampling(temperature=2, seed=seed)))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@needs_llama
def test_a_text_ends_with_the_context(model: Model) -> None:
    generation = model.generate(PROMPT, sampling=Sampling(temperature=5, seed=3))
    text_of(generation)
    facts = generation.facts
    if facts.end != "stop":
        assert facts.end == "context"
        assert facts.prompt_count + facts.step_count == 64


@needs_llama
def test_a_text_ends_before_a_stop_text(model: Model) -> None:
    whole = text_of(model.generate(PROMPT, count=20, sampling=GREEDY))
    stop = whole[5:8]
    generation = model.generate(PROMPT, count=20, sampling=GREEDY, stops=["never", stop])
    pieces = list(generation)
    assert "".join(pieces) == whole[: whole.index(stop)]
    assert generation.facts.end == "stop"
    longer = model.generate(PROMPT, count=20, sampling=GREEDY, stops=[whole[-1] + "and on"])
    assert text_of(longer) == whole, "what was held back comes in the end"


@needs_llama
def test_what_begins_as_before_is_not_computed_again(model: Model) -> None:
    text_of(model.generate(PROMPT, count=3, sampling=GREEDY))
    again = model.generate(PROMPT + " there was", count=3, sampling=GREEDY)
    first = text_of(again)
    assert again.facts.kept_count > 1
    text_of(model.generate("Something else", count=3, sampling=GREEDY))
    assert text_of(model.generate(PROMPT + " there was", count=3, sampling=GREEDY)) == first


@needs_llama
def test_a_text_that_is_left_has_facts_too(model: Model) -> None:
    generation = model.generate(PROMPT, count=20, sampling=GREEDY)
    pieces = iter(generation)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert generation.facts.end == "left"
    assert generation.facts.token_count >= 1


@needs_llama
def test_wrong_wishes_are_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="does not fit into the context"):
        model.generate("word " * 100)
    with pytest.raises(RequestError, match="no tokens"):
        model.generate(PROMPT, count=0)
    for wrong in ({"temperature": -1}, {"top_p": 2}, {"min_p": -0.1}, {"seed": 1 << 40}):
        with pytest.raises(RequestError, match="out of bounds"):
            model.generate(PROMPT, sampling=Sampling(**wrong))
    with pytest.raises(RequestError, match="no template for chats"):
        model.chat([Message("user", "hello")])
    with pytest.raises(RequestError, match="not a length"):
        Model(first_shard("qwen3moe"), memory="much")
    with pytest.raises(SourceError):
        Model(FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf")


@needs_llama
@pytest.mark.parametrize("policy", caching.POLICIES)
def test_a_simulation_of_its_trace_counts_what_it_counted(
    policy: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "t.moetrace"
    with Model(packs["qwen3moe"], policy=policy, trace=path, **SMALL) as model:
        budget = model.memory.experts
        generations = []
        for prompt in ("On", "And so it went on and on, as far as there was room for it"):
            generation = model.generate(prompt, count=25, sampling=Sampling(temperature=2))
            text_of(generation)
            generations.append(generation.facts)
    batch_count = generations[0].batch_count
    assert batch_count < generations[1].prompt_count, "a prompt of several batches"
    options = moepack.ReadOptions(shape=moepack.shape_of(packs["qwen3moe"]))
    found = moepack.simulate(
        [str(path)],
        budgets=[budget],
        policies=[policy],
        batch_count=batch_count,
        options=options,
    )
    (one,) = found.results
    hits, misses = (sum(getattr(one, name) for one in generations) for name in ("hits", "misses"))
    assert min(hits, misses) > 0
    assert one.decode_hit_rate == hits / (hits + misses)
    read_length = sum(facts.read_length for facts in generations)
    assert one.bytes_per_token == read_length / found.decode_token_count
    prompts = [facts.prompt for facts in generations]
    assert one.read_length == read_length + sum(prompt.read_length for prompt in prompts)
    hits += sum(prompt.hits for prompt in prompts)
    misses += sum(prompt.misses for prompt in prompts)
    assert one.hit_rate == hits / (hits + misses)


@needs_llama
def test_a_chat_is_what_its_template_makes_of_it(chat_path: Path) -> None:
    messages = [Message("system", "be brief"), Message("user", "hello")]
    with Model(chat_path, **SMALL) as model:
        assert model.has_chat_template
        answer = text_of(model.chat(messages, count=5, sampling=GREEDY))
        written = "<system>be brief<user>hello<answer>"
        assert answer == text_of(model.generate(written, count=5, sampling=GREEDY))
        with pytest.raises(RequestError, match="refuses the messages: not this"):
            model.chat([Message("user", "refuse")])


@needs_llama
def test_a_trace_that_is_there_is_refused_before_the_model_is_looked_at(tmp_path: Path) -> None:
    trace = tmp_path / "t.moetrace"
    trace.write_text("precious")
    with pytest.raises(RequestError, match="t.moetrace"):
        Model(tmp_path / "none.gguf", trace=trace)
    assert trace.read_text() == "precious"


@needs_llama
def test_a_text_that_no_context_holds_is_refused(tmp_path: Path) -> None:
    """As a hostile template makes it of a short one."""
    path = write_chat_model(tmp_path / "m.gguf", "{{ 'a' * 67108865 }}{{ messages }}")
    with Model(path, **SMALL) as model, pytest.raises(RequestError, match="too long"):
        model.chat([Message("user", "hello")])


def test_a_template_says_what_it_says() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content | tojson }}", "m", "<s>")
    assert template.prompt([Message("user", 'a "ü" <b>')]) == '<s>"a \\"ü\\" <b>"'
    assert ChatTemplate("{{ strftime_now('%Y') }}", "m").prompt([]).isdigit()


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for n in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content.format(messages[0].__class__) ~ raise_exception('x') }}",
    ],
)
def test_a_hostile_template_does_nothing(hostile: str) -> None:
    with pytest.raises(RequestError, match="refuses the messages"):
        ChatTemplate(hostile, "m").prompt([Message("user", "hello")])


def test_a_broken_template_is_the_sources_fault() -> None:
    with pytest.raises(SourceError, match="chat template is broken"):
        ChatTemplate("{% if %}", "m")


def test_without_jinja_the_hint_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MachineError, match="jinja2 is not installed") as raised:
        ChatTemplate(TEMPLATE, "m")
    assert "[run]" in (raised.value.hint or "")
