"""Options of llama.cpp, as people type them to `run` and `serve`, and prompts behind a model."""

from pathlib import Path

import click
import pytest

from moepack.cli.launch import launch
from moepack.cli.run import _split_prompt, run, serve
from moepack.cli.words.llama_command import check_rest
from moepack.common.errors import RequestError


@pytest.mark.parametrize(
    ("typed", "model", "rest"),
    [
        ("m.gguf -p x", "m.gguf", None),
        ("-m m.gguf -p -ngl", "m.gguf", None),
        ("--model=m.gguf -n5", "m.gguf", None),
        ("-n5 -hf a/b:Q8_0 -p x", "hf://a/b/Q8_0", None),
        ("--hf-repo=a/b", "hf://a/b", None),
        ("m -c 4 -t 2 -- -np 1 -md d", "m", "-np 1 -md d"),
        ("m -- llama-cli -m {}", "m", "llama-cli -m {}"),
    ],
)
def test_the_model_is_named_as_in_llama_cpp_and_its_options_follow_the_dashes(
    typed: str, model: str, rest: str | None
) -> None:
    params = run.make_context("run", typed.split()).params
    assert params["source_or_pack"] == (model,)
    assert params["rest"] == (None if rest is None else tuple(rest.split()))


def test_run_knows_the_names_of_llama_cpp_for_its_options() -> None:
    typed = "m --ctx-size 8 --n-predict=3 -sys s --ubatch-size 9 --temp 0 --seed 1 --min-p 0.1"
    params = run.make_context("run", typed.split()).params
    names = ("context", "tokens", "system", "micro_batch", "temperature", "seed", "min_p")
    assert [params[name] for name in names] == [8, 3, "s", 9, 0, 1, 0.1]
    assert run.make_context("run", ["m", "--predict", "4"]).params["tokens"] == 4
    assert run.make_context("run", ["m", "--system-prompt", "t"]).params["system"] == "t"


@pytest.mark.parametrize(
    ("command", "typed", "passed_on"),
    [
        (run, "m -fa -ctk q8_0 --jinja", "-fa on -ctk q8_0 --jinja"),
        (run, "-fa off m --cache-type-v=q8_0", "-fa off --cache-type-v q8_0"),
        (serve, "m --ctx-size 8 --jinja -n 3 -ub 64 --temp 0", "--jinja -n 3 -ub 64 --temp 0"),
        (serve, "-hf a/b -fa --top-k 1", "-fa on --top-k 1"),
    ],
)
def test_some_options_of_the_server_are_passed_on(
    command: click.Command, typed: str, passed_on: str
) -> None:
    context = command.make_context(str(command.name), typed.split())
    assert context.params["passed_on"] == passed_on.split()


@pytest.mark.parametrize(
    ("typed", "problem", "hint"),
    [
        ("-ngl 99 m", "-ngl: moepack's own", "moepack run m -- llama-server -m {} -ngl 99"),
        ("m --n-cpu-moe=3", "--n-cpu-moe: moepack's own", "llama-server -m {} --n-cpu-moe=3"),
        ("m --server s -ngl 9", "No such option", "follows --: moepack run m -- -ngl 9"),
        ("m -np 4", "No such option", "follows --: moepack serve m -- -np 4"),
        ("m --port 99", "--port is no option of", "moepack serve m --port 99"),
        ("m -j {}", "-j is no option of", "moepack run m -- llama-cli -m {} -j '{}'"),
        ("m -cnv", "-cnv is no option of", "leave it out"),
        ("m --mlock", "--mlock is no option of", "--memory says how much"),
        ("-hff x.gguf", "-hff is no option of", "hf://OWNER/NAME/Q4_K_M"),
        ("--keep 3 m -n5", "No such option", "follows --: moepack run m -- --keep 3"),
        ("m --bogus 3 -m n", "No such option", "follows --: moepack run m -- --bogus 3"),
        ("-m", "-m names no model", "-m FILE"),
    ],
)
def test_other_options_are_answered_with_what_to_type(typed: str, problem: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        run.make_context("run", typed.split())
    assert caught.value.problem.startswith(problem)
    assert hint in (caught.value.hint or "")


def test_each_command_says_where_its_options_of_llama_server_go() -> None:
    for command, words, hint in (
        (serve, ["m", "-np", "2"], "moepack serve m -- -np 2"),
        (launch, ["llm", "m", "-np", "2"], "LLAMA_ARG_N_PARALLEL=2"),
    ):
        with pytest.raises(RequestError) as caught:
            command.make_context(str(command.name), words)
        assert hint in (caught.value.hint or "")


def test_what_the_server_heeds_in_requests_alone_is_refused_for_one_text() -> None:
    with pytest.raises(RequestError, match="-j has no effect"):
        check_rest(["m"], ["-ub", "8", "-j", "{}"], is_one_text=True)
    check_rest(["m"], ["-j", "{}"])


@pytest.mark.parametrize(
    ("rest", "hint"),
    [
        ("-np 2 --port 81", "moepack serve x.gguf --port 81 -- -np 2"),
        ("--host=0.0.0.0", "moepack serve x.gguf --host 0.0.0.0"),
        ("-m other --metrics", "moepack serve other -- --metrics"),
        ("--alias x", "moepack serve x.gguf --name x"),
        ("-hf a/b", "moepack serve hf://a/b"),
    ],
)
def test_what_would_break_a_server_is_refused_behind_the_dashes(rest: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_rest(["x.gguf"], rest.split())
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("typed", "prompt"),
    [
        ("MODEL|Why is it?", "Why is it?"),
        ("Why is it?|-m|MODEL", "Why is it?"),
        ("MODEL|Why?|-n|3", None),
        ("MODEL|summarise notes.gguf", "summarise notes.gguf"),
        ("MODEL|/etc is what", "/etc is what"),
        ("MODEL|nowhere/ is what", "nowhere/ is what"),
        ("MODEL|llama-3 or llama-4, which?", "llama-3 or llama-4, which?"),
        ("a b.gguf", None),
        ("MODEL|./a b.gguf", None),
        ("MODEL|~/a b.gguf", None),
        ("model-00001-of-00006.gguf|a b", None),
    ],
)
def test_a_last_argument_that_is_no_path_is_a_prompt(
    typed: str, prompt: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").touch()
    (tmp_path / "MODEL").touch()
    monkeypatch.chdir(tmp_path)
    words = run.make_context("run", typed.split("|")).params["source_or_pack"]
    expected = (words, None) if prompt is None else (("MODEL",), prompt)
    assert _split_prompt(words, None, None)[:2] == expected
