"""The commands of traces and hotness, as their users call them."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.children import MOEPACK, Piped, wait_until
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_llama
from tests.support.recordings import read_recording
from tests.support.warm_command import Run, json_of

TRACE = FIXTURES / "qwen3moe-trace.csv"
IMATRIX = FIXTURES / "qwen3moe-imatrix.gguf"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Write a log of one response, of two layers and three experts a token."""
    path = tmp_path / "single_response_1.txt"
    lines = []
    for token in range(300):
        lines.append(f"---token {token}")
        for layer in (0, 1):
            lines += [f"layer {layer} expert {(token * 3 + layer + n) % 16}" for n in (1, 5, 9)]
    path.write_text("\n".join(["main: server is listening", *lines, ""]))
    return path


def test_import_writes_one_trace_of_several_files(log: Path, tmp_path: Path, cli: Run) -> None:
    target = tmp_path / "out.moetrace"
    facts = json_of(cli("trace", "import", log, TRACE, "-o", target, "--json"))
    assert facts["token_count"] == 300 + 192
    assert facts["request_count"] == 2
    assert facts["selection_count"] == 300 * 6 + 1284
    assert [origin["format"] for origin in facts["origins"]] == ["expert-log", "call-csv"]
    assert facts["unknown"] == ["phases", "requests"]
    assert target.stat().st_size < 1284 + 1800
    assert sorted(os.listdir(tmp_path)) == ["out.moetrace", log.name]
    again = json_of(cli("trace", "import", target, "-o", tmp_path / "b", "--json"))
    assert again["token_count"] == 300 + 192
    assert (tmp_path / "b").read_bytes() == target.read_bytes()
    text = cli("trace", "import", log, another(log), "-o", target, "--force").stdout
    assert f"{target}: 600 tokens in 2 requests, 3,600 selections" in text


def another(log: Path) -> Path:
    """Write a log like another one, of which one selection differs."""
    path = log.with_name("another.txt")
    path.write_text(log.read_text().replace("layer 0 expert 5\n", "layer 0 expert 6\n", 1))
    return path


@pytest.mark.parametrize(
    "words",
    ["trace import -o new", "hotness --force -o hot.csv", "trace stats", "trace concentration"],
)
def test_the_same_selections_are_not_counted_twice(
    words: str, log: Path, tmp_path: Path, cli: Run
) -> None:
    """The halves that hotness is judged by would be copies of each other.

    Nor are they under another name or in another format.
    """
    copy, renamed = tmp_path / "copy.moetrace", log.with_name("renamed.log")
    cli("trace", "import", log, "-o", copy)
    renamed.write_text("another heading\n" + log.read_text())
    for again in ([copy, log], [another(log), copy, renamed]):
        run = cli(*words.split(), *again, cwd=tmp_path)
        assert run.returncode == 2
        assert f"{again[-1]}: its selections came already" in run.stderr
    assert cli(*words.split(), log, another(log), cwd=tmp_path).returncode == 0
    if words.startswith("hotness"):
        assert cli("hotness", IMATRIX, IMATRIX, "-o", "-").returncode == 2


def test_files_of_other_models_are_counted_and_said(tmp_path: Path, cli: Run) -> None:
    for expert, model in enumerate(("a", "b")):
        heading = f"# model={model}\nturn,phase,step,layer,slot,expert,\n"
        (tmp_path / model).write_text(f"{heading}0,1,0,0,0,{expert},\n")
    run = cli("hotness", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "hot.csv")
    assert "2 selections of 2 experts over" in run.stdout
    assert "counted together, though of different models: a, b" in run.stdout


def test_selections_that_another_line_swallowed_are_counted(
    log: Path, tmp_path: Path, cli: Run
) -> None:
    glued = tmp_path / "glued.log"
    text = log.read_text().replace("\nlayer 0 expert 5\n", "\nsrv update: layer 0 expert 5\n")
    count = log.read_text().count("\nlayer 0 expert 5\n")
    glued.write_text(text)
    facts = json_of(cli("trace", "stats", glued, "--json"))
    assert facts["warnings"] == {"selections within other lines": count}


@needs_llama
def test_record_runs_a_model_on_prompts(tmp_path: Path, cli: Run) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nThe quick brown fox\n")
    target = tmp_path / "out.moetrace"
    arguments = ("--model", first_shard("qwen3moe"), "--prompts", prompts, "-o", target)
    run = cli("trace", "record", *arguments, "--tokens", "4", "--context", "64", "--json")
    facts = json_of(run)
    assert facts["request_count"] == 2
    assert facts["origins"][0]["format"] == "recorded"
    assert facts["origins"][0]["unknown"] == []
    shown = json_of(cli("trace", "stats", target, "--window", "2", "--json"))
    assert shown["window_count"] == 4
    assert json_of(cli("hotness", target, "-o", tmp_path / "h", "--json"))["held_out"]
    again = cli("trace", "record", *arguments)
    assert again.returncode == 2
    target.rename(f"{target}.partial")
    rescued = json_of(cli("trace", "stats", f"{target}.partial", "--json"))
    assert rescued["request_count"] == 2


@pytest.mark.long
@needs_llama
def test_an_interrupted_recording_keeps_what_was_finished(tmp_path: Path) -> None:
    """By Ctrl-C, which reaches all processes of a terminal."""
    prompts, target = tmp_path / "prompts.txt", tmp_path / "out.moetrace"
    prompts.write_text("Once upon a time\n" * 400)
    command = (*MOEPACK, "trace", "record", "--model", first_shard("qwen3moe"))
    partial = Path(f"{target}.partial")
    words = ("--prompts", prompts, "-o", target, "--tokens", "8")
    with Piped(*command, *words, start_new_session=True) as child:
        wait_until(lambda: partial.exists() and partial.stat().st_size > 1000)
        os.killpg(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in errors
    kept = int(errors.partition("hint: ")[2].split()[0])
    assert f"{kept} of 400 prompts are kept in {target}" in errors
    assert not partial.exists()
    _, tokens = read_recording(target)
    assert len(set(tokens.request.tolist())) == kept > 0
