"""Options of llama.cpp, as people type them to `run` and `serve`."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from moepack.cli.run import _split_prompt, run, serve
from moepack.cli.words.llama_command import RUN, SERVE, Translation, check_rest, split_fields
from moepack.common.errors import RequestError
from tests.support.needs import needs_llama


@pytest.mark.parametrize(
    ("typed", "words", "passed_on"),
    [
        ("m.gguf -p x", "m.gguf -p x", ""),
        ("-m m.gguf -p -ngl", "m.gguf -p -ngl", ""),
        ("--model=m.gguf", "m.gguf", ""),
        ("m --ctx-size 8 --n-predict=3 --predict 4", "m --context 8 --tokens 3 --tokens 4", ""),
        ("m -sys a --system-prompt b", "m --system a --system b", ""),
        ("m --ubatch-size 9", "m --micro-batch 9", ""),
        ("m -no-cnv --temp 0 --seed -1", "m --raw --temp 0 --seed -1", ""),
        ("m -fa -ctk q8_0", "m", "-fa on -ctk q8_0"),
        ("m -fa off --ignore-eos -q", "m -q", "-fa off --ignore-eos"),
        ("m --grammar=x -i --color --jinja", "m", "--grammar x --jinja"),
        ("m -fa true --cpu-strict 1", "m", "-fa true --cpu-strict 1"),
        ("-n5 -m m", "m -n5", ""),
        ("-n5 -hf a/b:Q8_0 -p x", "hf://a/b/Q8_0 -n5 -p x", ""),
        ("--hf-repo=a/b", "hf://a/b", ""),
        ("m -ngl 0 --mmap", "m", ""),
        ("-c 4 -t 2 -ub 8 m -n5", "-c 4 -t 2 -ub 8 m -n5", ""),
    ],
)
def test_run_understands_what_is_typed(typed: str, words: str, passed_on: str) -> None:
    translation = Translation(run, typed.split(), RUN)
    assert (translation.words, translation.passed_on) == (words.split(), passed_on.split())


@pytest.mark.parametrize(
    ("typed", "words", "passed_on"),
    [
        ("m --ctx-size 8 -a x --port 1", "m --context 8 --name x --port 1", ""),
        ("m -np 2 --metrics -ub 64 -b 64", "m", "-np 2 --metrics -ub 64 -b 64"),
    ],
)
def test_serve_understands_what_is_typed(typed: str, words: str, passed_on: str) -> None:
    translation = Translation(serve, typed.split(), SERVE)
    assert (translation.words, translation.passed_on) == (words.split(), passed_on.split())


@pytest.mark.parametrize(
    ("typed", "problem", "hint"),
    [
        ("-ngl 99 m", "-ngl: moepack's own", "moepack run m -- llama-server -m {} -ngl 99"),
        ("m --n-cpu-moe=3", "--n-cpu-moe: moepack's own", "llama-server -m {} --n-cpu-moe 3"),
        ("m -ot exps=CPU", "-ot: moepack's own llama.cpp", "-ot exps=CPU"),
        ("m -cmoe", "-cmoe: moepack's own llama.cpp", "llama-server -m {} -cmoe"),
        ("m --mlock", "--mlock: llama.cpp would read or lock the whole model", "--memory"),
        ("m --no-mmap", "--no-mmap: llama.cpp would read or lock", "leave it out"),
        ("m -np 4", "-np: `run` computes one text at a time", "moepack serve m -- -np 4"),
        ("m --port 99", "--port: `run` is not a server", "moepack serve m --port 99"),
        ("m -hf a/b:Q8_0", "the model is named twice: m, and -m hf://a/b/Q8_0", "name it once"),
        ("-hff x.gguf", "-hff: a model on the hub has an address", "hf://OWNER/NAME/Q4_K_M"),
        ("m -m n", "the model is named twice: m, and -m n", "name it once"),
        ("m -n5 -m n", "the model is named twice: m, and -m n", "name it once"),
        ("-m", "-m names no model", "-m FILE"),
        ("m --swa-full=1", "--swa-full takes no value", "--swa-full alone"),
        ("m -no-cnv=1", "-no-cnv takes no value", "-no-cnv alone"),
    ],
)
def test_the_rest_is_answered_with_what_to_type(typed: str, problem: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        run.make_context("run", typed.split())
    assert caught.value.problem.startswith(problem)
    assert hint in (caught.value.hint or "")


def test_a_batch_is_noted_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert Translation(run, ["m", "-b", "512"], RUN).words == ["m"]
    assert "micro-batches (-ub): -b 512 has no effect here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rest", "hint"),
    [
        ("-np 2 --port 81", "moepack serve x.gguf --port 81 -- -np 2"),
        ("--host=0.0.0.0", "moepack serve x.gguf --host 0.0.0.0"),
        ("-m other --metrics", "moepack serve other -- --metrics"),
        ("--alias x", "moepack serve x.gguf --name x"),
        ("-hf a/b", "moepack serve hf://OWNER/NAME/Q4_K_M"),
    ],
)
def test_what_would_break_a_server_is_refused_behind_the_dashes(rest: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_rest(["x.gguf"], rest.split())
    assert hint in (caught.value.hint or "")


def test_what_the_server_heeds_in_requests_alone_goes_there(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "array"}')
    words = ["--keep", "3", "-j", '{"type": "object"}', "-l", "5+1", "--logit-bias", "6-inf", "-fa"]
    fields = {"json_schema": {"type": "object"}, "logit_bias": [[5, 1.0], [6, False]]}
    assert split_fields(words) == (["--keep", "3", "-fa"], fields)
    assert split_fields(["-jf", str(path)]) == ([], {"json_schema": {"type": "array"}})


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("-j {", "-j: not JSON"),
        ("-j 3", "-j: not a JSON schema"),
        ("-jf /nothing/there", "-jf: No such file"),
        ("-l five", "-l: not a token's bias"),
        ("-j", "-j has no value"),
    ],
)
def test_what_cannot_go_into_requests_is_refused(typed: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        split_fields(typed.split())


@pytest.mark.parametrize("typed", ["--bogus 3 -m m", "m --bogus 3 -m n", "--bogus 3 -ngl 9"])
def test_the_value_of_an_unknown_option_is_no_model(typed: str) -> None:
    with pytest.raises(click.NoSuchOption, match="--bogus"):
        run.make_context("run", typed.split())


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


OPTION = re.compile(r"((?:-\S+, +)*-\S+)((?: (?:<[^>]*>|\S)+)*)")
"""The names of an option in llama.cpp's help, and its values, each behind one space."""


@pytest.mark.parametrize(
    "rest", ["-c 256 --metrics", "--ctx-size=256", "-np 2 -t 1", "--threads 1"]
)
def test_an_option_on_both_sides_of_the_dashes_is_refused(rest: str) -> None:
    with pytest.raises(RequestError, match="is given before and after --"):
        check_rest(["x.gguf"], rest.split(), {"--context": 512, "--threads": 2})
    check_rest(["x.gguf"], rest.split(), {"--context": None, "--threads": None})


@needs_llama
def test_llama_cpp_knows_every_option_that_is_passed_on_and_how_many_values_it_takes() -> None:
    command = [sys.executable, "-m", "moepack.running.serving.server", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    value_counts = {
        name: len(re.sub("<[^>]*>", "_", match[2]).split())
        for match in filter(None, map(OPTION.match, help_text.splitlines()))
        for name in match[1].replace(",", " ").split()
    }
    assert len(value_counts) > 200
    for name, spelling in (*RUN.items(), *SERVE.items()):
        if spelling == spelling._replace(name=None, problem=None, note=None, is_left_out=False):
            assert value_counts[name] == spelling.values, name
