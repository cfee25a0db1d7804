"""The command `run`, as its users meet it."""

import json
import os
import re
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_model import write_chat_model
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.terminals import MOEPACK, on_terminal

pytestmark = needs_llama

Command = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--memory", "floor", "--context", "256", "--threads", "1", "--temperature", "0")
SHARD = first_shard("qwen3moe")


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a template for chats."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "chat.gguf")


def test_a_prompt_is_answered_by_a_gguf_and_by_its_pack_alike(
    moepack_command: Command, packs: dict[str, Path]
) -> None:
    runs = [
        moepack_command("run", path, "-p", "Hello", "-n", "7", *SMALL)
        for path in (SHARD, packs["qwen3moe"])
    ]
    for run in runs:
        assert run.returncode == 0, run.stderr
        memory, prompt, answer = without_notes(run.stderr)
        assert memory.startswith("memory for experts: ")
        assert re.fullmatch(
            r"prompt: 4 tokens, [\d,.]+ tok/s, first token after \d+\.\d\d s", prompt
        )
        assert answer.startswith("answer: 7 tokens, ")
        reading = r"nothing read|.+ read a token, .+ of the time waiting for the drive \(.+/s\)"
        assert re.search(rf" tok/s, \S+ hits, ({reading}), .+ of experts in memory", answer), answer
    assert runs[0].stdout == runs[1].stdout
    quiet = moepack_command("run", SHARD, "-p", "Hello", "-n", "7", "-q", *SMALL)
    assert (quiet.stdout, quiet.stderr) == (runs[0].stdout, "")


def without_notes(text: str) -> list[str]:
    """Return lines but for notes: a machine may be busy."""
    return [line for line in text.splitlines() if not line.startswith("note: ")]


def test_stats_are_said_while_it_runs(moepack_command: Command) -> None:
    plain = moepack_command("run", SHARD, "-p", "Hello", "-n", "7", *SMALL)
    stats = moepack_command("run", SHARD, "-p", "Hello", "-n", "7", "--stats", *SMALL)
    assert stats.returncode == 0, stats.stderr
    assert stats.stdout == plain.stdout


def test_json_has_the_numbers(moepack_command: Command, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Hello")
    run = moepack_command("run", SHARD, "-f", tmp_path / "prompt.txt", "-n", "7", "--json", *SMALL)
    assert run.stderr == ""
    facts = json.loads(run.stdout)
    assert (facts["token_count"], facts["step_count"], facts["end"]) == (7, 6, "length")
    prompt = facts["prompt"]
    assert prompt["step_count"] == facts["prompt_count"] == 4
    alone = moepack_command("run", SHARD, "-p", "Hello", "-n", "1", "--json", *SMALL)
    one_token = json.loads(alone.stdout)
    assert (one_token["hits"], one_token["misses"], one_token["tokens_per_second"]) == (0, 0, None)
    assert _lookups(facts) == _lookups(one_token) + 6 * 2 * 4
    assert facts["read_length"] + prompt["read_length"] > 0
    assert facts["tokens_per_second"] > 0
    assert facts["memory"]["experts"] == facts["memory"]["floor"] > 0
    text = moepack_command("run", SHARD, "-p", "Hello", "-n", "7", "-q", *SMALL).stdout
    assert facts["text"] + "\n" == text


def _lookups(facts: dict[str, Any]) -> int:
    """Count those of the prompt as well: where it ends is known to within some tokens."""
    return sum(phase[name] for phase in (facts, facts["prompt"]) for name in ("hits", "misses"))


def test_hits_are_unknown_while_all_experts_are_in_memory(moepack_command: Command) -> None:
    arguments = (
        "run",
        SHARD,
        "-p",
        "Hello",
        "-n",
        "5",
        *SMALL,
        "--memory",
        "1GiB",
        "--pin",
        "1GiB",
    )
    run = moepack_command(*arguments, "--json")
    facts = json.loads(run.stdout)
    assert (facts["hits"], facts["hit_rate"]) == (None, None)
    assert (facts["misses"], facts["read_length"]) == (0, 0)
    assert "tok/s, – hits, nothing read" in moepack_command(*arguments).stderr


def test_a_terminal_obeys_nothing_that_a_model_says(
    moepack_command: Command, tmp_path: Path
) -> None:
    """A pipe gets the text as it was generated; new lines and tabs reach both."""
    control = "\x1b]0;title\x07\x9b1m\u202e\x7f\b\t\n"
    path = write_chat_model(tmp_path / "chat.gguf", suffix=control)
    command = ("run", str(path), "--raw", "-p", "a", "-n", "30", "-q", *SMALL)
    piped = moepack_command(*command).stdout
    assert piped.count(control) > 3
    shown = on_terminal(*MOEPACK, *command).replace("\r\n", "\n")
    assert shown.count("\\x1b]0;title\\x07\\x9b1m\\u202e\\x7f\\x08\t\n") == piped.count(control)
    assert not [c for c in shown if c not in "\t\n" and unicodedata.category(c) == "Cc"]
    assert "\u202e" not in shown


def test_a_chat_answers_line_by_line(moepack_command: Command, chat_path: Path) -> None:
    run = moepack_command("run", chat_path, "-n", "3", *SMALL, input="hello\n\nand again\n")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("answer: 3 tokens") == 2
    alone = moepack_command("run", chat_path, "-n", "3", "-q", "-p", "hello", *SMALL)
    assert run.stdout.startswith(alone.stdout)
    told = moepack_command(
        "run", chat_path, "-n", "3", "-q", "-p", "hello", "--system", "be brief", *SMALL
    )
    raw = moepack_command(
        "run",
        chat_path,
        "-n",
        "3",
        "-q",
        "--raw",
        *SMALL,
        "-p",
        "<system>be brief<user>hello<answer>",
    )
    assert told.stdout == raw.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-p", "x", "--memory", "300KiB"], 2, "too little memory"),
        (["-p", "x", "--memory", "lots"], 2, "`floor` is the only word"),
        (["-p", "x", "--memory", "1,5GiB"], 2, "--memory: not a size"),
        (["-p", "x", "--pin", "floor"], 2, "--pin: not a size"),
        (["-p", ""], 2, "the prompt is empty"),
        (["-p", "x", "--raw", "--system", "y"], 2, "--system needs"),
        (["-f", "/dev/zero"], 2, "the prompt is too long"),
        (["-p", "x", "-f", "y"], 2, "at once"),
        (["-f", "nowhere.txt"], 2, "cannot read the prompt"),
        (["--json"], 2, "needs a prompt"),
        (["-p", "x", "-n", "0"], 2, "no tokens are asked for"),
        (["-p", "x", "--seed", "-2"], 2, "seed out of bounds"),
        (["-p", "x", "--raw", "--chat-template", "chatml"], 2, "--chat-template needs one"),
        (["--chat-template", "chatmale"], 2, "no chat template of that name, found chatmale"),
        (["--chat-template", "{% for"], 2, "cannot use the chat template, found {% for"),
        (["--chat-template-file", "nowhere"], 2, "cannot read the chat template"),
        (["-p", "word " * 100, "--context", "16"], 2, "does not fit into the context"),
        (["-p", "x", "--temperature", "-3"], 2, "temperature out of bounds"),
        (["-p", "x", "--system", "y"], 2, "no template for chats"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], code: int, words: str, moepack_command: Command
) -> None:
    run = moepack_command("run", SHARD, "--threads", "1", *arguments)
    assert run.returncode == code, run.stderr
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_a_file_that_is_no_model_is_said_to_be_none(
    moepack_command: Command, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUG" + bytes(100))
    run = moepack_command("run", tmp_path / "m.gguf", "-p", "x")
    assert run.returncode == 3


def test_an_interruption_ends_it() -> None:
    """Of a text that goes on for hundreds of tokens, after the first of them."""
    arguments = ["run", str(SHARD), "-p", "x", "--temp", "0", "-t", "1"]
    command = [sys.executable, "-m", "moepack", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint.splitlines()[-1] == b"error: interrupted"


def test_a_model_without_a_template_is_refused_before_anything_is_loaded(
    moepack_command: Command, tmp_path: Path
) -> None:
    """Neither the too little memory nor the trace is met, which come later."""
    trace = tmp_path / "trace"
    run = moepack_command("run", SHARD, "--memory", "1KiB", "--trace", trace, input="x\n")
    assert run.returncode == 2
    error, hint = run.stderr.splitlines()
    assert error.endswith("the model has no template for chats")
    assert all(word in hint for word in ("--chat-template chatml", "--raw -p TEXT"))
    assert not list(tmp_path.iterdir())


def test_a_template_is_given_by_its_name_as_a_text_and_in_a_file(
    moepack_command: Command, tmp_path: Path
) -> None:
    text = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    (tmp_path / "template").write_text(text)
    arguments = ("run", SHARD, "-n", "5", "-q", *SMALL)
    told = [
        moepack_command(*arguments, "-p", "hello", *template).stdout
        for template in (
            ("--raw", "-p", "[hello]"),
            ("--chat-template", text),
            ("--chat-template-file", tmp_path / "template"),
        )
    ]
    assert told[0] == told[1] == told[2]
    name = moepack_command(*arguments, "--chat-template", "llama2", input="hello\n").stdout
    raw = moepack_command(*arguments, "--raw", "-p", "[INST] hello [/INST]").stdout
    assert name == raw


def test_a_seed_is_by_chance_and_gives_the_same_again(moepack_command: Command) -> None:
    warm = ("--memory", "floor", "-t", "1", "--temp", "2", "-n", "9", "-p", "Hello")
    runs = [moepack_command("run", SHARD, *warm, *seed) for seed in ((), ("-s", "-1"), ())]
    seeds = [re.findall(r"; seed (\d+)$", run.stderr, re.MULTILINE)[0] for run in runs]
    assert len({run.stdout for run in runs}) == len(set(seeds)) == 3
    again = moepack_command("run", SHARD, *warm, "-s", seeds[0], "--json")
    facts = json.loads(again.stdout)
    assert (facts["text"] + "\n", facts["seed"]) == (runs[0].stdout, int(seeds[0]))


@pytest.mark.parametrize(
    ("options", "context", "notes"),
    [
        ((), "2048", 0),  # what it was trained for: less than the usual
        (("-c", "0"), "2048", 0),
        (("-c", "512"), "512", 0),
        (("--ctx-size", "8192"), "8192", 1),
    ],
)
def test_a_context_is_no_longer_than_the_model_was_trained_for(
    options: tuple[str, ...], context: str, notes: int, moepack_command: Command
) -> None:
    run = moepack_command("run", SHARD, "-p", "x", "-n", "1", "-t", "1", "-v", *options)
    assert run.returncode == 0, run.stderr
    assert f"options of llama-server: -c {context} -np 1 " in run.stderr
    note = "note: the model was trained for 2,048 tokens of context, and uses no more of it\n"
    assert run.stderr.count(note) == notes


def test_verbose_says_how_it_was_started(moepack_command: Command) -> None:
    run = moepack_command("run", SHARD, "-p", "x", "-n", "1", "-v", "--backend", "buffered", *SMALL)
    assert re.search(r"^loaded in \d+\.\d s$", run.stderr, re.MULTILINE)
    assert "\nexperts are read by buffered\n" in run.stderr
    assert re.search(r"\noptions of llama-server: -c 256 .* -t 1\n", run.stderr)


def test_threads_that_a_variable_names_are_those_that_notes_speak_of(
    moepack_command: Command,
) -> None:
    environment = {**os.environ, "LLAMA_ARG_THREADS": "3"}
    run = moepack_command("run", SHARD, "-p", "x", "-n", "1", "-v", env=environment)
    assert re.search(r"\noptions of llama-server: .* -t 3\n", run.stderr), run.stderr


@pytest.mark.parametrize(("micro_batch", "batch"), [(1, 32), (200, 200)])
def test_a_batch_is_no_longer_than_what_is_computed_at_once(
    micro_batch: int, batch: int, moepack_command: Command
) -> None:
    """Else a prompt that is left would be computed for long, and the next one waits for it."""
    arguments = ("-p", "x", "-n", "1", "-v", "-ub", micro_batch, *SMALL)
    run = moepack_command("run", SHARD, *arguments)
    assert run.returncode == 0, run.stderr
    assert f" -b {batch} -ub {micro_batch} -t 1\n" in run.stderr


@pytest.mark.parametrize("option", [("-n", "-1"), ("--n-predict", "-2"), ()])
def test_a_text_may_go_on_as_long_as_there_is_context(
    option: tuple[str, ...], moepack_command: Command
) -> None:
    arguments = ("--memory", "floor", "-c", "256", "-t", "1", "--ignore-eos", "--json", *option)
    facts = json.loads(moepack_command("run", SHARD, "-p", "x", *arguments).stdout)
    assert facts["end"] == "context"
    assert facts["token_count"] > 200


def test_no_more_threads_than_processors_that_may_be_used_are_started() -> None:
    processors = os.sched_getaffinity(0)
    command = [*MOEPACK, "run", str(SHARD), "-p", "x", "-n", "1", "-v", "--memory", "floor"]
    os.sched_setaffinity(0, {min(processors)})
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        os.sched_setaffinity(0, processors)
    is_limited = (os.cpu_count() or 1) > 1
    assert (" -t 1\n" in run.stderr) == is_limited


def test_options_of_llama_cpp_mean_what_they_do_there(
    moepack_command: Command, chat_path: Path
) -> None:
    ours = moepack_command(
        "run", chat_path, "-p", "hello", "--system", "be brief", "-n", "5", "-q", *SMALL
    )
    theirs = moepack_command(
        *("run", "-m", chat_path, "--ctx-size", "256", "-t", "1", "--temp", "0", "-p", "hello"),
        *("-sys", "be brief", "--n-predict=5", "-ngl", "0", "-fa", "--jinja", "-cnv", "-q"),
        *("-ctk", "f16", "--memory", "floor", "--ubatch-size", "64"),
    )
    assert (theirs.returncode, theirs.stdout) == (0, ours.stdout), theirs.stderr


def test_experts_in_memory_take_no_more_than_they_may(
    moepack_command: Command, packs: dict[str, Path]
) -> None:
    """Small ones, whose whole pages take far more than they."""
    arguments = ("run", packs["qwen3moe"], "-p", "Hello", "-n", "30", *SMALL)
    for memory in ("floor", "1GiB"):
        facts = json.loads(moepack_command(*arguments, "--memory", memory, "--json").stdout)
        assert 0 < facts["held_length"] <= facts["memory"]["experts"]
