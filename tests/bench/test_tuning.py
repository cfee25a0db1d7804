"""Options that are tried, and kept only if they win in both rounds with the same text."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import moepack
from moepack.bench import tuning
from moepack.bench.tuning import Settings, TuningFacts, _Run
from moepack.common.errors import MachineError
from moepack.report import measure_text
from tests.support.models import FIXTURES
from tests.support.needs import needs_llama
from tests.support.values import some

CHAT = FIXTURES / "chat-00001-of-00002.gguf"


def tried(rounds: Mapping[str, Sequence[float | str]], texts: Mapping[str, str] = {}) -> str:
    """Return what is kept of values with these seconds, by round, or an error."""
    calls = {value: iter(seconds) for value, seconds in rounds.items()}

    def measure(settings: Settings) -> _Run:
        value = settings.get("policy", "default")
        seconds = next(calls[value])
        if isinstance(seconds, str):
            raise MachineError(seconds)
        return _Run(seconds, (texts.get(value, "text"),))

    trials, best = tuning._try("policy", [one for one in rounds if one != "default"], {}, measure)
    assert best == ({} if trials.kept == "default" else {"policy": trials.kept})
    assert [one.value for one in trials.trials] == list(rounds)
    return trials.kept


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ((0.96, 0.96), "a"),
        ((0.98, 0.90), "default"),  # in one round alone
        ((0.90, 0.98), "default"),
        ((1.0, 1.0), "default"),
        ((0.90, "it ended"), "default"),
    ],
)
def test_a_value_has_to_win_in_both_rounds(seconds: Sequence[float | str], kept: str) -> None:
    assert tried({"default": (1.0, 1.0), "a": seconds}) == kept


def test_the_fastest_with_the_same_text_is_kept() -> None:
    rounds = {"default": (1.0, 1.0), "a": (0.8, 0.8), "b": (0.7, 0.7), "c": (0.5, 0.5)}
    assert tried(rounds, {"c": "another text"}) == "b"


@needs_llama
def test_a_model_is_tuned_and_the_command_is_one_of_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With real servers, of which one option wins in the end, since its measured time is halved."""
    measured = tuning._measure

    def faster(*arguments: object) -> _Run:
        settings = next(one for one in arguments if isinstance(one, dict))
        words.append(next(one for one in arguments if isinstance(one, list)))
        run = measured(*arguments)  # type: ignore[arg-type]
        return run._replace(seconds=0.5 if "policy" in settings else 1.0)

    def values(prompt_tokens: int, texts: int) -> Iterator[tuple[str, list[str]]]:
        yield "policy", ["lru"]
        yield "backend", ["nonsense"]

    monkeypatch.setattr(tuning, "_measure", faster)
    monkeypatch.setattr(tuning, "_values", values)
    monkeypatch.setattr(tuning, "_ROUNDS", 1)
    calls: list[int] = []
    words: list[list[str]] = []
    facts = moepack.tune(
        CHAT,
        memory="50%",
        prompt_tokens=30,
        tokens=4,
        texts=2,
        progress=lambda *all_: calls.append(all_[1]),
    )
    assert len(calls) == calls[0] == 2 + 2 + 2
    assert words[0][::2] == ["-c"], "the server chooses all else, as without options"
    assert (facts.options, facts.gain) == ({"policy": "lru"}, 2.0)
    assert [one.kept for one in facts.tried] == ["lru", "default"]
    assert "backend" in some(facts.tried[1].trials[1].refusal)
    assert facts.command.endswith(" --memory 50% --policy lru")
    assert "2.00 times as fast as the defaults" in str(measure_text.tuning(facts))


def test_options_stand_where_serve_takes_them() -> None:
    settings = {"-t": "2", "-ub": "4096", "policy": "lru", "-np": "1"}
    command = tuning._command("m.gguf", "8GiB", settings)
    assert command == (
        "moepack serve m.gguf --memory 8GiB -t 2 --policy lru -- -ub 4096 -np 1 -b 4096"
    )
    for memory, text in (("50%", "50%"), (8 << 30, "8GiB"), ((8 << 30) + 7, "8192MiB")):
        assert tuning._command("m.gguf", memory, {}) == f"moepack serve m.gguf --memory {text}"
    facts = TuningFacts(str(Path("m.gguf")), 10, 5, 1, (), {}, None, "moepack serve m.gguf")
    assert "nothing that was tried is faster" in str(measure_text.tuning(facts))
