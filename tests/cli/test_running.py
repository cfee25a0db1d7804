"""The command `run`, as its users meet it."""

import json
import os
import re
import signal
import subprocess
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_model import write_chat_model
from tests.support.children import MOEPACK, Piped
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.terminals import on_terminal
from tests.support.warm_command import Run

pytestmark = needs_llama

SMALL = ("--memory", "floor", "--context", "256", "--threads", "1", "--temperature", "0")
SHARD = first_shard("qwen3moe")


def test_a_prompt_is_answered_by_a_gguf_and_by_its_pack_alike(
    cli: Run, packs: dict[str, Path]
) -> None:
    runs = [
        cli("run", path, "-p", "Hello", "-n", "7", *SMALL) for path in (SHARD, packs["qwen3moe"])
    ]
    for run in runs:
        assert run.returncode == 0, run.stderr
        lines = run.stderr.splitlines()
        memory, prompt, answer = (line for line in lines if not line.startswith("note: "))
        assert memory.startswith("memory for experts: ")
        assert re.search("context of 256 tokens [0-9.]+ KiB, .*; all together [0-9.]+ MiB", memory)
        assert re.fullmatch(
            r"prompt: 4 tokens, [\d,.]+ tok/s, first token after \d+\.\d\d s", prompt
        )
        assert answer.startswith("answer: 7 tokens, ")
        reading = r"nothing read|.+ read a token, .+ of the time waiting for the drive \(.+/s\)"
        assert re.search(rf" tok/s, \S+ hits, ({reading}), .+ of experts in memory", answer), answer
    assert runs[0].stdout == runs[1].stdout
    quiet = cli("run", SHARD, "-p", "Hello", "-n", "7", "-q", "--stats", *SMALL)
    assert (quiet.stdout, quiet.stderr) == (runs[0].stdout, "")


def test_json_has_the_numbers(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Hello")
    raw = ("-f", tmp_path / "prompt.txt", "--raw")
    run = cli("run", SHARD, *raw, "-n", "7", "--json", *SMALL)
    assert run.stderr == ""
    facts = json.loads(run.stdout)
    assert (facts["token_count"], facts["step_count"], facts["end"]) == (7, 6, "length")
    prompt = facts["prompt"]
    assert prompt["step_count"] == facts["prompt_count"] == 4
    alone = cli("run", SHARD, "-p", "Hello", "-n", "1", "--json", *SMALL)
    one_token = json.loads(alone.stdout)
    assert (one_token["hits"], one_token["misses"], one_token["tokens_per_second"]) == (0, 0, None)
    assert _lookups(facts) == _lookups(one_token) + 6 * 2 * 4
    assert facts["read_length"] + prompt["read_length"] > 0
    assert facts["tokens_per_second"] > 0
    assert facts["memory"]["experts"] == facts["memory"]["floor"] > 0
    text = cli("run", SHARD, "-p", "Hello", "-n", "7", "-q", *SMALL).stdout
    assert facts["text"] + "\n" == text


def _lookups(facts: dict[str, Any]) -> int:
    """Count those of the prompt as well: where it ends is known to within some tokens."""
    return sum(phase[name] for phase in (facts, facts["prompt"]) for name in ("hits", "misses"))


def test_hits_are_unknown_while_all_experts_are_in_memory(cli: Run) -> None:
    everything = ("--memory", "1GiB", "--pin", "1GiB")
    arguments = ("run", SHARD, "-p", "Hello", "-n", "5", *SMALL, *everything)
    run = cli(*arguments, "--json")
    facts = json.loads(run.stdout)
    assert (facts["hits"], facts["hit_rate"]) == (None, None)
    assert (facts["misses"], facts["read_length"]) == (0, 0)
    assert "tok/s, – hits, nothing read" in cli(*arguments).stderr


def test_a_terminal_obeys_nothing_that_a_model_says(cli: Run, tmp_path: Path) -> None:
    """A pipe gets the text as it was generated; new lines and tabs reach both."""
    control = "\x1b]0;title\x07\x9b1m\u202e\x7f\b\t\n"
    path = write_chat_model(tmp_path / "chat.gguf", suffix=control)
    command = ("run", str(path), "--raw", "-p", "a", "-n", "30", "-q", *SMALL)
    piped = cli(*command).stdout
    assert piped.count(control) > 3
    shown = on_terminal(*MOEPACK, *command).replace("\r\n", "\n")
    assert shown.count("\\x1b]0;title\\x07\\x9b1m\\u202e\\x7f\\x08\t\n") == piped.count(control)
    assert not [c for c in shown if c not in "\t\n" and unicodedata.category(c) == "Cc"]
    assert "\u202e" not in shown


def test_a_system_prompt_goes_through_the_template(cli: Run, chat_path: Path) -> None:
    brief = ("run", chat_path, "-n", "3", "-q", *SMALL)
    texts = cli(*brief, "-p", "hello", "--system", "be brief")
    prompt = "<system>be brief<user>hello<answer>"
    assert texts.stdout == cli(*brief, "--raw", "-p", prompt).stdout


@pytest.mark.long
def test_an_interruption_ends_it() -> None:
    """Of a text that goes on for hundreds of tokens, after the first of them."""
    words = (*MOEPACK, "run", SHARD, "-p", "x", "--temp", "0", "-t", "1")
    with Piped(*words, stdin=subprocess.DEVNULL) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint.splitlines()[-1] == "error: interrupted"


def test_a_model_without_a_template_continues_texts_in_chats_as_with_p(cli: Run) -> None:
    """Each by itself, and a note says so; of a system prompt nothing would be left."""
    arguments = ("run", SHARD, "-n", "7", *SMALL)
    alone = cli(*arguments, "-p", "Hello")
    chat = cli(*arguments, input="x\nHello\n/system be brief\n")
    assert (alone.returncode, chat.returncode) == (0, 2), chat.stderr
    assert chat.stdout.endswith(alone.stdout)
    raw = cli(*arguments, "--raw", input="x\nHello\n")
    assert (raw.returncode, raw.stdout) == (0, chat.stdout)
    for run, note_count in ((alone, 1), (chat, 1), (raw, 0)):
        assert run.stderr.count("note: the model has no template for chats") == note_count
    assert "a system prompt needs a template" in chat.stderr
    system = cli(*arguments, "--memory", "1KiB", "-p", "x", "--system", "y")
    assert (system.returncode, "--chat-template chatml" in system.stderr) == (2, True)


def test_a_prompt_comes_from_files_and_pipes_without_its_last_new_line(
    cli: Run, tmp_path: Path
) -> None:
    """Behind another one, if there is one."""
    path = tmp_path / "prompt"
    path.write_text("Hello\n\nthere\n")
    brief = ("run", SHARD, "-n", "7", "-q", "--raw", *SMALL)
    texts = [
        cli(*brief, "-p", "Hello\n\nthere").stdout,
        cli(*brief, "-f", path).stdout,
        cli(*brief, "-p", "-", input="Hello\n\nthere\n").stdout,
        cli(*brief, "-p", "Hello", input="there\n").stdout,
        cli(*brief, "-p", "Hello", input="there").stdout,
        cli("run", SHARD, *brief[2:], "-f", path, "--", "-fa", "on").stdout,
    ]
    path.write_text("there\n")
    with path.open() as file:
        texts.append(cli(*brief, "-p", "Hello", stdin=file).stdout)
    assert len(set(texts)) == 1
    assert texts[0] != cli(*brief, "-p", "Hello").stdout


@pytest.mark.long
def test_a_pipe_in_which_nothing_comes_is_left_out_with_a_note() -> None:
    arguments = ("run", SHARD, "-p", "Hello", "-n", "1", *SMALL)
    with Piped(*MOEPACK, *arguments) as process:
        assert process.wait(60) == 0
        assert "note: nothing comes on standard input" in process.stderr.read()


def test_a_template_is_given_by_its_name_as_a_text_and_in_a_file(cli: Run, tmp_path: Path) -> None:
    text = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    (tmp_path / "template").write_text(text)
    arguments = ("run", SHARD, "-n", "5", "-q", *SMALL)
    texts = [
        cli(*arguments, "-p", "hello", *template).stdout
        for template in (
            ("--raw", "-p", "[hello]"),
            ("--chat-template", text),
            ("--chat-template-file", tmp_path / "template"),
        )
    ]
    assert texts[0] == texts[1] == texts[2]
    name = cli(*arguments, "--chat-template", "llama2", input="hello\n").stdout
    raw = cli(*arguments, "--raw", "-p", "[INST] hello [/INST]").stdout
    assert name == raw


def test_a_seed_is_by_chance_and_gives_the_same_again(cli: Run) -> None:
    warm = ("--memory", "floor", "-t", "1", "--temp", "2", "-n", "9", "-p", "Hello")
    runs = [cli("run", SHARD, *warm, *seed) for seed in ((), ("-s", "-1"), ())]
    seeds = [re.findall(r"; seed (\d+)$", run.stderr, re.MULTILINE)[0] for run in runs]
    assert len({run.stdout for run in runs}) == len(set(seeds)) == 3
    again = cli("run", SHARD, *warm, "-s", seeds[0], "--json")
    facts = json.loads(again.stdout)
    assert (facts["text"] + "\n", facts["seed"]) == (runs[0].stdout, int(seeds[0]))


@pytest.mark.parametrize(
    ("options", "words", "note_count"),
    [
        ((), "-c 2048 -np 1 ", 0),  # the trained length: less than the usual
        (("-c", "0", "-ub", "1", "-t", "1"), "-c 2048 .* -b 32 -ub 1 -t 1$", 0),
        (("-c", "512", "-ub", "200", "--backend", "buffered"), "-c 512 .* -b 200 -ub 200", 0),
        (("-c", "8192", "-t", "2"), "-c 8192 .* -t 2$", 1),
    ],
)
def test_the_server_gets_no_more_context_and_batch_than_it_uses(
    options: tuple[str, ...], words: str, note_count: int, cli: Run
) -> None:
    """A longer batch that is left would be computed on, and the next prompt waits for it."""
    run = cli("run", SHARD, "-p", "x", "-n", "1", "-v", "--memory", "floor", *options)
    assert run.returncode == 0, run.stderr
    assert re.search(f"^options of llama-server: {words}", run.stderr, re.MULTILINE), run.stderr
    note = "note: the model was trained for 2,048 tokens of context, and uses no more\n"
    assert run.stderr.count(note) == note_count
    assert re.search(r"^loaded in \d+\.\d s$", run.stderr, re.MULTILINE)
    assert "buffered" not in options or "\nexperts are read by buffered\n" in run.stderr


def test_threads_that_a_variable_names_are_those_that_notes_speak_of(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_THREADS", "3")
    run = cli("run", SHARD, "-p", "x", "-n", "1", "-v")
    assert re.search(r"\noptions of llama-server: .* -t 3\n", run.stderr), run.stderr


@pytest.mark.parametrize("option", [("-n", "-2"), ()])
def test_a_text_may_go_on_as_long_as_there_is_context(option: tuple[str, ...], cli: Run) -> None:
    arguments = ("--memory", "floor", "-c", "256", "-t", "1", "--json", *option)
    run = cli("run", SHARD, "-p", "x", *arguments, "--", "--ignore-eos")
    facts = json.loads(run.stdout)
    assert facts["end"] == "context"
    assert facts["token_count"] > 200


@pytest.mark.long
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


def test_options_of_llama_cpp_mean_what_they_do_there(cli: Run, chat_path: Path) -> None:
    brief = ("-m", chat_path, "-p", "hello", "--system", "be brief", "-q", *SMALL)
    ours = cli("run", *brief, "-n", "5")
    theirs = cli("run", *brief, "--", "--n-predict", "5", "-fa", "on", "--jinja", "-ctk", "f16")
    assert (theirs.returncode, theirs.stdout) == (0, ours.stdout), theirs.stderr
