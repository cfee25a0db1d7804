"""Options of llama.cpp, as people type them to `run` and `serve`."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.cli.llama_spellings import RUN, SERVE, check_rest, translate
from moepack.cli.request_fields import split_fields
from moepack.cli.running import run
from moepack.cli.serving import serve
from moepack.errors import RequestError
from tests.support.needs import needs_llama


@pytest.mark.parametrize(
    ("typed", "words", "passed_on"),
    [
        ("m.gguf -p x", "m.gguf -p x", ""),
        ("-m m.gguf -p -ngl", "m.gguf -p -ngl", ""),
        ("--model=m.gguf", "m.gguf", ""),
        ("m --ctx-size 8 --n-predict=3 --predict 4", "m --context 8 --tokens 3 --tokens 4", ""),
        (
            "m -sys a --system-prompt b --ubatch-size 9",
            "m --system a --system b --micro-batch 9",
            "",
        ),
        ("m -no-cnv --temp 0 --seed -1", "m --raw --temp 0 --seed -1", ""),
        ("m -fa -ctk q8_0", "m", "-fa on -ctk q8_0"),
        ("m -fa off --ignore-eos -q", "m -q", "-fa off --ignore-eos"),
        ("m --grammar=x -i --color --jinja", "m", "--grammar x"),
        ("m -ngl 0 --mmap", "m", ""),
        ("-c 4 -t 2 -ub 8 m -n5", "-c 4 -t 2 -ub 8 m -n5", ""),
    ],
)
def test_run_understands_what_is_typed(typed: str, words: str, passed_on: str) -> None:
    assert translate(run, typed.split(), RUN) == (words.split(), passed_on.split())


@pytest.mark.parametrize(
    ("typed", "words", "passed_on"),
    [
        ("m --ctx-size 8 -a x --port 1", "m --context 8 --name x --port 1", ""),
        ("m -np 2 --metrics -ub 64 -b 64", "m", "-np 2 --metrics -ub 64 -b 64"),
    ],
)
def test_serve_understands_what_is_typed(typed: str, words: str, passed_on: str) -> None:
    assert translate(serve, typed.split(), SERVE) == (words.split(), passed_on.split())


@pytest.mark.parametrize(
    ("typed", "problem", "hint"),
    [
        (
            "-ngl 99 m.gguf",
            "-ngl: the llama.cpp",
            "moepack run m.gguf -- llama-server -m {} -ngl 99",
        ),
        ("m --n-cpu-moe=3", "--n-cpu-moe: the llama.cpp", "llama-server -m {} --n-cpu-moe 3"),
        ("m -ot exps=CPU", "-ot: the llama.cpp", "-ot exps=CPU"),
        ("m -cmoe", "-cmoe: the llama.cpp", "llama-server -m {} -cmoe"),
        ("m --mlock", "--mlock: llama.cpp would read or lock the whole model", "--memory"),
        ("m --no-mmap", "--no-mmap: llama.cpp would read or lock", "leave it out"),
        ("m -np 4", "-np: `run` computes one text at a time", "moepack serve m -- -np 4"),
        ("m --port 99", "--port: `run` serves nobody", "moepack serve m --port 99"),
        ("-hf a/b", "-hf: moepack downloads nothing yet", "hf download a/b --include"),
        ("m -m n", "the model is named twice: m, and -m n", "name it once"),
        ("-m", "-m names no model", "-m FILE"),
    ],
)
def test_the_rest_is_answered_with_what_to_type(typed: str, problem: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        translate(run, typed.split(), RUN)
    assert caught.value.problem.startswith(problem)
    assert hint in (caught.value.hint or "")


def test_a_batch_is_noted_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert translate(run, ["m", "-b", "512"], RUN) == (["m"], [])
    assert "micro-batches (-ub): -b 512 changes nothing here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rest", "hint"),
    [
        ("-np 2 --port 81", "moepack serve x.gguf --port 81 -- -np 2"),
        ("--host=0.0.0.0", "moepack serve x.gguf --host 0.0.0.0"),
        ("-m other --metrics", "moepack serve other -- --metrics"),
        ("--alias x", "moepack serve x.gguf --name x"),
        ("-hf a/b", "hf download"),
    ],
)
def test_what_would_break_a_server_is_refused_behind_the_dashes(rest: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_rest(["x.gguf"], rest.split())
    assert hint in (caught.value.hint or "")


def test_other_options_may_stand_behind_the_dashes() -> None:
    check_rest(["x.gguf"], ["-np", "2", "-c", "512", "--metrics"])


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


@needs_llama
def test_llama_cpp_knows_every_option_that_is_passed_on() -> None:
    command = [sys.executable, "-m", "moepack.programs.server", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    known = set(run.stdout.replace(",", " ").split())
    for spellings in (RUN, SERVE):
        passed_on = {
            name
            for name, spelling in spellings.items()
            if spelling == spelling._replace(name=None, problem=None, note=None, is_left_out=False)
        }
        assert passed_on - known == set()
