"""The commands of traces and hotness, as their users call them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.hotness import file
from moepack.trace.formats import registry
from moepack.trace.model import Tokens
from moepack.trace.validation import Checks
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_llama
from tests.support.recordings import larger_than_memory

Run = Callable[..., subprocess.CompletedProcess[str]]
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


def body(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_import_writes_one_trace_of_several_files(
    log: Path, tmp_path: Path, moepack_command: Run
) -> None:
    target = tmp_path / "out.moetrace"
    facts = body(moepack_command("trace", "import", log, TRACE, "-o", target, "--json"))
    assert facts["token_count"] == 300 + 192
    assert facts["request_count"] == 2
    assert facts["selection_count"] == 300 * 6 + 1284
    assert [origin["format"] for origin in facts["origins"]] == ["expert-log", "call-csv"]
    assert facts["unknown"] == ["phases", "requests"]
    assert target.stat().st_size < 1284 + 1800
    assert sorted(os.listdir(tmp_path)) == ["out.moetrace", log.name]
    again = body(moepack_command("trace", "import", target, "-o", tmp_path / "b", "--json"))
    assert again["token_count"] == 300 + 192
    assert (tmp_path / "b").read_bytes() == target.read_bytes()


def test_import_never_overwrites_but_appends(
    log: Path, tmp_path: Path, moepack_command: Run
) -> None:
    target = tmp_path / "out.moetrace"
    assert moepack_command("trace", "import", log, "-o", target).returncode == 0
    before = target.read_bytes()
    refused = moepack_command("trace", "import", log, "-o", target)
    assert refused.returncode == 2
    assert "--append" in refused.stderr
    assert target.read_bytes() == before
    other = another(log)
    facts = body(moepack_command("trace", "import", other, "-o", target, "--append", "--json"))
    assert (facts["token_count"], facts["request_count"]) == (600, 2)
    assert facts["added"]["token_count"] == 300
    facts = body(moepack_command("trace", "stats", target, "--json"))
    assert (facts["window_count"], facts["request_count"]) == (4, 2)


def another(log: Path) -> Path:
    """Write a log like another one, of which one selection differs."""
    path = log.with_name("another.txt")
    path.write_text(log.read_text().replace("layer 0 expert 5\n", "layer 0 expert 6\n", 1))
    return path


def test_the_message_of_an_import_tells_the_whole_file_and_what_is_new(
    log: Path, tmp_path: Path, moepack_command: Run
) -> None:
    target = tmp_path / "out.moetrace"
    first = moepack_command("trace", "import", log, "-o", target).stdout
    assert f"{target}: 300 tokens in 1 request, 1,800 selections" in first
    assert "added" not in first
    second = moepack_command("trace", "import", another(log), "-o", target, "--append").stdout
    assert f"{target}: 600 tokens in 2 requests, 3,600 selections" in second
    assert "added just now: 300 tokens in 1 request, 1,800 selections" in second


def test_the_same_selections_are_not_added_twice(
    log: Path, tmp_path: Path, moepack_command: Run
) -> None:
    """The halves that hotness is judged by would be copies of each other."""
    target = tmp_path / "out.moetrace"
    moepack_command("trace", "import", log, "-o", target)
    before = target.read_bytes()
    renamed = log.with_name("renamed.log")
    renamed.write_text("another heading\n" + log.read_text())
    for again in ([log], [renamed], [another(log), log]):
        run = moepack_command("trace", "import", *again, "-o", target, "--append")
        assert run.returncode == 2
        assert f"{again[-1]}: its selections came already" in run.stderr
        assert target.read_bytes() == before
    assert moepack_command("trace", "import", log, log, "-o", tmp_path / "b").returncode == 2


def test_a_file_is_not_counted_twice(log: Path, tmp_path: Path, moepack_command: Run) -> None:
    """Nor a copy of it in another format."""
    copy, target = tmp_path / "copy.moetrace", tmp_path / "hot.csv"
    moepack_command("trace", "import", log, "-o", copy)
    for command, again in (
        (["trace", "concentration"], log),
        (["trace", "stats"], copy),
        (["hotness", "--force", "-o", target], copy),
        (["hotness", "--force", "--weights", "2,1", "-o", target], log),
    ):
        run = moepack_command(*command, log, again)
        assert run.returncode == 2
        assert f"{again}: its selections came already" in run.stderr
        assert moepack_command(*command, log, another(log)).returncode == 0
    assert moepack_command("hotness", "--force", IMATRIX, IMATRIX, "-o", target).returncode == 2


def test_a_fault_leaves_nothing_behind(log: Path, tmp_path: Path, moepack_command: Run) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("decode_call,token_in_call,layer,occurrence,experts\n0,0,0,0,1 2\n0,0,x,0,1\n")
    run = moepack_command("trace", "import", log, bad, "-o", tmp_path / "out")
    assert run.returncode == 3
    assert f"{bad}: line 3" in run.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))
    run = moepack_command("trace", "import", bad, "-o", tmp_path / "out", "--lenient", "--json")
    assert body(run)["warnings"] == {"not a line of this format": 1}


def test_a_fault_while_appending_leaves_what_was_there(
    log: Path, tmp_path: Path, moepack_command: Run
) -> None:
    target = tmp_path / "out"
    moepack_command("trace", "import", log, "-o", target)
    before = target.read_bytes()
    other = tmp_path / "other.csv"
    other.write_text("layer,expert,count\n0,1,-5\n")
    run = moepack_command("trace", "import", another(log), other, "-o", target, "--append")
    assert run.returncode == 3
    assert target.read_bytes() == before


def test_stats_in_bytes(log: Path, packs: dict[str, Path], moepack_command: Run) -> None:
    plain = moepack_command("trace", "stats", log)
    assert "2 windows of 128 tokens in 1 request\n" in plain.stdout
    for option, value in (("--pack", packs["qwen3moe"]), ("--model", first_shard("qwen3moe"))):
        facts = body(moepack_command("trace", "stats", log, option, value, "--json"))
        last = facts["working_set"][-1]
        assert last["expert_count"] == 32
        assert last["length"] == length_of_all(packs["qwen3moe"])
        assert "KiB" in moepack_command("trace", "stats", log, option, value).stdout


def test_stats_of_a_short_trace(log: Path, tmp_path: Path, moepack_command: Run) -> None:
    """The window fits, and what is not known is no number."""
    short = tmp_path / "short.log"
    short.write_text(log.read_text().partition("---token 40\n")[0])
    run = moepack_command("trace", "stats", short)
    assert "2 windows of 16 tokens in 1 request\n" in run.stdout
    for window, unknown in (
        ("21", {"new_count", "new_length"}),
        ("41", {"expert_count", "length"}),
    ):
        arguments = ("trace", "stats", short, "--window", window)
        row = body(moepack_command(*arguments, "--json"))["working_set"][-1]
        assert all(row[key] is None for key in unknown | {"new_count", "new_length"})
        line = moepack_command(*arguments).stdout.splitlines()[9].split()
        assert line == ["100.0%", "–" if window == "41" else "32.00", "–"]


def length_of_all(pack_path: Path) -> int:
    """Return the bytes of all experts of qwen3moe, without padding."""
    with moepack.open(pack_path) as pack:
        kinds = [kind.length for layer in pack.layers for kind in pack.parts(layer)]
        return 16 * sum(kinds)


def test_a_log_of_another_model_is_refused(log: Path, moepack_command: Run) -> None:
    run = moepack_command("trace", "stats", log, "--model", first_shard("mixtral"))
    assert run.returncode == 3
    assert "line " in run.stderr
    assert "another model" in run.stderr


def test_concentration_and_its_plot(log: Path, tmp_path: Path, moepack_command: Run) -> None:
    for name, start in (("c.png", b"\x89PNG"), ("c.svg", b"<?xml")):
        run = moepack_command("trace", "concentration", log, "--plot", tmp_path / name)
        assert run.returncode == 0, run.stderr
        assert "even router" in run.stdout
        assert (tmp_path / name).read_bytes().startswith(start)
    facts = body(moepack_command("trace", "concentration", log, "--json"))
    assert facts["halves"] == "time"
    assert [layer["layer"] for layer in facts["layers"]] == [0, 1]
    refused = moepack_command("trace", "concentration", log, "--plot", tmp_path / "c.txt")
    assert refused.returncode == 2


def test_concentration_takes_an_imatrix(moepack_command: Run) -> None:
    facts = body(moepack_command("trace", "concentration", IMATRIX, "--json"))
    assert (facts["verdict"], facts["halves"]) == ("unknown", None)


def test_hotness_is_written_and_packed(log: Path, tmp_path: Path, moepack_command: Run) -> None:
    target = tmp_path / "hot.csv"
    arguments = ("hotness", log, IMATRIX, "--weights", "1,0.25", "-o", target)
    facts = body(moepack_command(*arguments, "--json"))
    assert facts["held_out"] is None
    assert file.load(str(target)).counts
    run = moepack_command(
        "pack", first_shard("qwen3moe"), "-o", tmp_path / "p", "--hotness", target
    )
    assert run.returncode == 0, run.stderr
    for weights in ("1", "1,x", "0,1", "1,nan"):
        run = moepack_command("hotness", log, IMATRIX, "--weights", weights, "-o", target)
        assert run.returncode == 2, weights


def test_files_of_other_models_are_counted_and_said(tmp_path: Path, moepack_command: Run) -> None:
    for model in ("a", "b"):
        body_ = {"model": model, "layers": [{"layer": 0, "heat": [5]}]}
        (tmp_path / model).write_text(json.dumps(body_))
    paths = (tmp_path / "a", tmp_path / "b")
    run = moepack_command("hotness", *paths, "--weights", "3,1", "-o", tmp_path / "hot.csv")
    assert "20 selections of 1 expert over" in run.stdout
    assert "counted together, though of different models: a, b" in run.stdout
    assert "left out" not in run.stdout


def test_a_file_is_never_counted_into_itself(log: Path, moepack_command: Run) -> None:
    before = log.read_bytes()
    assert moepack_command("hotness", log, "-o", log).returncode == 2
    assert log.read_bytes() == before


@pytest.mark.parametrize("path", [TRACE, FIXTURES / "qwen3moe-hotness.csv"])
@pytest.mark.parametrize("unpack", ["cat {}", "gzip -c {}"])
def test_a_pipe_is_read_to_its_end(
    path: Path, unpack: str, tmp_path: Path, moepack_command: Run
) -> None:
    """A pipe can be opened but once; and a packed hotness file is one as well."""
    moepack = f"{sys.executable} -m moepack"
    command = f"{unpack.format(path)} | {moepack} hotness /dev/stdin -o {tmp_path}/piped"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert moepack_command("hotness", path, "-o", tmp_path / "plain").returncode == 0
    piped, plain = (file.load(str(tmp_path / name)) for name in ("piped", "plain"))
    assert (piped.counts, piped.token_count) == (plain.counts, plain.token_count)


def test_counts_that_no_file_holds_are_refused(tmp_path: Path, moepack_command: Run) -> None:
    path = tmp_path / "c.csv"
    path.write_text("layer,expert,count\n0,0,9007199254740000\n0,1,1\n")
    run = moepack_command("hotness", path, "--weights", "1000000", "-o", tmp_path / "x")
    assert run.returncode == 3
    assert "counts that add up to too many" in run.stderr
    assert not (tmp_path / "x").exists()


def test_selections_that_another_line_swallowed_are_counted(
    log: Path, tmp_path: Path, moepack_command: Run
) -> None:
    glued = tmp_path / "glued.log"
    text = log.read_text().replace("\nlayer 0 expert 5\n", "\nsrv update: layer 0 expert 5\n")
    count = log.read_text().count("\nlayer 0 expert 5\n")
    glued.write_text(text)
    facts = body(moepack_command("trace", "stats", glued, "--json"))
    assert facts["warnings"] == {"selections within other lines": count}


def test_pickles_are_refused_with_a_converter(tmp_path: Path, moepack_command: Run) -> None:
    path = tmp_path / "trace.pt"
    path.write_bytes(b"\x80\x04K\x01.")
    run = moepack_command("trace", "import", path, "-o", tmp_path / "x")
    assert run.returncode == 3
    assert "pickle" in run.stderr
    assert "numpy.savez" in run.stderr


def test_a_format_that_is_none_is_a_mistake_of_the_caller(log: Path, moepack_command: Run) -> None:
    run = moepack_command("trace", "stats", log, "--format", "sometext")
    assert run.returncode == 2
    assert "expert-log" in run.stderr


@needs_llama
def test_record_runs_a_model_on_prompts(tmp_path: Path, moepack_command: Run) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nThe quick brown fox\n")
    target = tmp_path / "out.moetrace"
    arguments = ("--model", first_shard("qwen3moe"), "--prompts", prompts, "-o", target)
    run = moepack_command(
        "trace", "record", *arguments, "--tokens", "4", "--context", "64", "--json"
    )
    facts = body(run)
    assert facts["request_count"] == 2
    assert facts["origins"][0]["format"] == "recorded"
    assert facts["origins"][0]["unknown"] == []
    shown = body(moepack_command("trace", "stats", target, "--window", "2", "--json"))
    assert shown["window_count"] == 4
    assert body(moepack_command("hotness", target, "-o", tmp_path / "h", "--json"))["held_out"]
    again = moepack_command("trace", "record", *arguments)
    assert again.returncode == 2
    target.rename(f"{target}.partial")
    killed = moepack_command("trace", "record", *arguments)
    assert killed.returncode == 2
    assert "rename it" in killed.stderr
    rescued = body(moepack_command("trace", "stats", f"{target}.partial", "--json"))
    assert rescued["request_count"] == 2


@needs_llama
def test_a_model_larger_than_memory_needs_an_option(tmp_path: Path, moepack_command: Run) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n")
    path = larger_than_memory(tmp_path / "model.gguf")
    arguments = ("--model", path, "--prompts", prompts, "-o", tmp_path / "out.moetrace")
    refused = moepack_command("trace", "record", *arguments)
    assert refused.returncode == 6
    assert "hint: --memory" in refused.stderr
    run = moepack_command("trace", "record", *arguments, "--no-repack")
    assert "llama.cpp cannot load the model" in run.stderr


def test_a_killed_import_does_not_block_the_next(
    log: Path, tmp_path: Path, moepack_command: Run
) -> None:
    pipe, target = tmp_path / "pipe", tmp_path / "out.moetrace"
    partial = Path(f"{target}.partial")
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "moepack", "trace", "import", str(pipe), "-o", str(target)]
    with subprocess.Popen(command) as child, open(pipe, "wb", buffering=0) as writer:
        writer.write(log.read_bytes())
        deadline = time.monotonic() + 60
        while not partial.exists():
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second = moepack_command("trace", "import", log, "-o", target)
        child.kill()
    assert second.returncode == 6
    assert "another process writes to it" in second.stderr
    assert partial.exists()
    assert not target.exists()
    assert moepack_command("trace", "import", log, "-o", target).returncode == 0
    assert sorted(os.listdir(tmp_path)) == sorted([log.name, pipe.name, target.name])


def test_an_import_of_nothing_leaves_nothing(tmp_path: Path, moepack_command: Run) -> None:
    empty = tmp_path / "counts.csv"
    empty.write_text("layer,expert,count\n0,0,0\n")
    for command in (["trace", "import"], ["hotness"]):
        run = moepack_command(*command, empty, "-o", tmp_path / "out")
        assert run.returncode == 3
        assert f"error: {empty}: no selections in it" in run.stderr
        assert os.listdir(tmp_path) == [empty.name]


@pytest.mark.long
@needs_llama
@pytest.mark.parametrize("options", [[], ["--memory", "floor"]])
def test_an_interrupted_recording_keeps_what_was_finished(
    tmp_path: Path, options: list[str]
) -> None:
    """By Ctrl-C, which reaches all processes of a terminal."""
    prompts, target = tmp_path / "prompts.txt", tmp_path / "out.moetrace"
    prompts.write_text("Once upon a time\n" * 5000)
    command = [sys.executable, "-m", "moepack", "trace", "record", "--model"]
    command += [str(first_shard("qwen3moe")), "--prompts", str(prompts), "-o", str(target)]
    partial = Path(f"{target}.partial")
    piped: Any = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([*command, *options], **piped) as child:
        deadline = time.monotonic() + 60
        while not (partial.exists() and partial.stat().st_size > 4000):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in errors
    kept = int(errors.partition("hint: ")[2].split()[0])
    assert f"{kept} of 5000 prompts are kept in {target}" in errors
    assert not partial.exists()
    items = list(registry.read(str(target), Checks(str(target))))
    requests = {int(one) for item in items if isinstance(item, Tokens) for one in item.request}
    assert len(requests) == kept > 0
