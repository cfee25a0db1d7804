"""The chat of `run`: in a pipe, and on a terminal of its own."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from moepack.cli.running.chat import parse_command
from tests.support import warm_command
from tests.support.children import MOEPACK, PATIENCE
from tests.support.models import flip, pack_model
from tests.support.needs import needs_llama
from tests.support.terminals import Terminal, plain
from tests.support.warm_command import Run

pytestmark = [pytest.mark.long, needs_llama]

SMALL = ("--memory", "floor", "--threads", "1", "--temperature", "0", "--seed", "7")
BRIEF = ("-n", "3", "-c", "256", *SMALL)
LONG = "x" * 300
"""A line that has no room in a context of 64 tokens."""
Answer = Callable[..., str]


@pytest.fixture(scope="module")
def alone(chat_path: Path) -> Answer:
    """Return a function for the answer to a prompt by itself."""

    @cache
    def answer(prompt: str, *options: str) -> str:
        words = ["run", str(chat_path), *BRIEF, "-q", "-p", prompt, *options]
        return str(warm_command.run(words).stdout)

    return answer


def test_an_error_ends_an_answer_alone_and_clear_begins_anew(
    cli: Run, chat_path: Path, alone: Answer
) -> None:
    arguments = ("run", chat_path, "-n", "3", "--context", "64", *SMALL)
    fine = cli(*arguments, input="a\nb\n /clear \nhello\n")
    run = cli(*arguments, input=f"a\n{LONG}\nb\n/clear\nrefuse\nhello\n")
    assert (fine.returncode, run.returncode) == (0, 2), "the exit code tells of the error"
    assert run.stdout == fine.stdout, "a question without an answer is forgotten"
    assert run.stdout.endswith(alone("hello"))
    lines = [line.partition(",")[0] for line in run.stderr.splitlines()[1:]]
    assert [line for line in lines if not line.startswith("prompt: ")] == [
        "answer: 3 tokens",
        "error: the prompt does not fit into the context",
        "hint: give it more with --context",
        "hint: /clear forgets the conversation",
        "answer: 3 tokens",
        "error: the model's chat template refuses the messages: not this",
        "answer: 3 tokens",
    ]


def test_a_damaged_expert_ends_an_answer_alone(cli: Run, chat_path: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    pack_model([chat_path], pack)
    for path in pack.glob("experts-*.bin"):
        for offset in range(5, path.stat().st_size, 4096):
            flip(path, offset)
    run = cli("run", pack, "-n", "3", "-q", *SMALL, input="hello\n\nagain\n")
    errors = run.stderr.splitlines()[::2]
    assert len(errors) == 2, run.stderr
    assert all(error.startswith("error: ") and "digest" in error for error in errors)
    assert (run.returncode, run.stdout) == (4, "")


def test_quoted_lines_paths_and_bytes_that_are_no_text_are_messages(
    cli: Run, chat_path: Path, alone: Answer
) -> None:
    """Quoted lines are one message, and none of them is a command; so ends a pipe as well."""
    lines = "a\n/clear\n\nb"
    messages = {
        "/etc/hosts is a file": "/etc/hosts is a file",
        '"""/bye"""': "/bye",
        f'"""{lines}"""': lines,
        f'"""\n{lines}\n"""': lines,
        f'  """{lines}\n""" ': lines,
        f'"""\n{lines}': lines,
    }
    text = "\n/clear\n".join(["\udcff", *messages])
    arguments = ("run", chat_path, *BRIEF, "-q")
    run = cli(*arguments, input=text.encode(errors="surrogateescape"), text=False)
    assert (run.returncode, run.stderr) == (0, b"")
    expected = "".join(map(alone, messages.values()))
    assert run.stdout.decode().endswith(expected)
    assert len(run.stdout) > len(expected.encode())


def test_a_command_of_a_chat_is_obeyed_and_never_sent(
    cli: Run, chat_path: Path, alone: Answer
) -> None:
    lines = "hello\n/help\n/?\n/nothing\n/clear it\n/bye\nno\n"
    run = cli("run", chat_path, *BRIEF, input=lines)
    assert (run.returncode, run.stdout) == (2, alone("hello"))
    assert run.stderr.count("/regen  ") == 2
    assert "error: not a chat command: /nothing\n" in run.stderr
    assert "hint: there are /help /regen /system /clear /stats /bye; " in run.stderr
    assert "error: /clear takes no argument, found it\n" in run.stderr
    assert run.stderr.count("answer: ") == 1


@pytest.mark.parametrize(
    ("typed", "prompt"),
    [
        ('"be brief"', "be brief"),
        ('"He said "yes""', '"He said "yes""'),
        ('say "yes"', 'say "yes"'),
        ('"yes" or "no"', '"yes" or "no"'),
        ('"""He said "yes""""', 'He said "yes"'),
        ('"', '"'),
    ],
)
def test_quotes_in_a_system_prompt_are_kept(
    typed: str, prompt: str, cli: Run, chat_path: Path
) -> None:
    run = cli("run", chat_path, *BRIEF, "-q", input=f"/system {typed}\n/system\n")
    assert run.stderr == f"{prompt}\n"


def test_several_lines_are_no_command() -> None:
    for text in ("/help\nline two", "/clear\n/bye", "/nothing\nat all\n"):
        assert parse_command(text) is None
    assert parse_command("/system be\nbrief") == ("system", "be\nbrief")
    assert parse_command(" /help\n") == ("help", "")


def test_an_answer_is_computed_again_with_another_seed(cli: Run, chat_path: Path) -> None:
    warm = ("--memory", "floor", "-t", "1", "--temp", "2", "-c", "256", "-n", "9")
    run = cli("run", chat_path, *warm, "-s", "5", input="/regen\nhello\n/regen\nand?\n")
    assert run.stderr.count("error: nothing has been answered yet") == 1
    assert re.findall(r"seed (\d+)", run.stderr) == ["5", "6", "5"]
    texts = [cli("run", chat_path, *warm, "-s", seed, "-p", "hello").stdout for seed in ("5", "6")]
    assert run.stdout.startswith("".join(texts))
    assert texts[0] != texts[1]


def test_the_system_prompt_is_shown_and_changed(cli: Run, chat_path: Path, alone: Answer) -> None:
    lines = '/system\n/system be brief\n/system\nhello\n/clear\n/system ""\nhello\n'
    run = cli("run", chat_path, *BRIEF, input=lines)
    assert run.stdout == alone("hello", "--system", "be brief") + alone("hello")
    shown = [line for line in run.stderr.splitlines()[1:] if ":" not in line]
    assert shown == ["there is no system prompt", "be brief"]


ENDLESS = ("--context", "2048", "--", "--ignore-eos")
"""Answers that end with the context alone: after seconds."""
PROMPT = r"\x1b\[\?2004h[^\n]*>"
"""The sequence with which a terminal invites typing."""


@pytest.fixture
def terminal(chat_path: Path) -> Iterator[Terminal]:
    """Begin a chat, up to its prompt."""
    yield from begin_chat(chat_path)


@pytest.fixture(scope="module")
def open_terminal(chat_path: Path) -> Iterator[Terminal]:
    yield from begin_chat(chat_path)


@pytest.fixture
def long_terminal(open_terminal: Terminal) -> Terminal:
    """Clear a chat that goes on: each test leaves it at the prompt."""
    open_terminal.type("/clear\r")
    open_terminal.until("the conversation is forgotten")
    open_terminal.until(PROMPT)
    return open_terminal


def begin_chat(chat_path: Path) -> Iterator[Terminal]:
    with Terminal(*MOEPACK, "run", str(chat_path), *SMALL, *ENDLESS) as terminal:
        terminal.until("/help lists the other commands")
        written = terminal.until(PROMPT)
        assert "\x1b[6n" not in written, "some terminals never answer where the cursor is"
        yield terminal


def begin_answer(terminal: Terminal) -> None:
    """Say something, and wait until it is being answered."""
    terminal.type("hello\r")
    terminal.until(r"hello[^\n]*\n")  # as it was typed
    terminal.until(r"\x1b\[\?2004l[^\x1b]")


def signal_children(process_id: int, number: signal.Signals) -> None:
    """Send a signal to the processes that one has started."""
    for path in Path(f"/proc/{process_id}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
            for child in path.read_text().split():
                os.kill(int(child), number)


def test_ctrl_c_ends_an_answer_and_never_the_chat(long_terminal: Terminal) -> None:
    for _ in range(2):
        begin_answer(long_terminal)
        long_terminal.type("\x03")  # a second one may make Linux drop what is not yet shown
        written = " ".join(plain(long_terminal.until(PROMPT)).split())
        # Where others keep the processors busy the prompt is still computed, of which a bar tells.
        assert "; interrupted" in written or "prompt [" in written


def test_ctrl_c_and_a_signal_clear_the_line_that_is_typed(long_terminal: Terminal) -> None:
    for is_signal in (False, True):
        long_terminal.type("hello")
        written = long_terminal.until("hello")
        if is_signal:
            long_terminal.process.send_signal(signal.SIGINT)
        else:
            long_terminal.type("\x03")
        written += long_terminal.until("Ctrl-D or /bye ends the chat")
        written += long_terminal.until(PROMPT)
        assert "\x1b[0m" in written
        assert not re.search(r"\x1b\[(?!0m)[0-9;]*m", written), "it has no colours"


def test_ctrl_c_at_any_moment_leaves_the_chat_as_it_was(long_terminal: Terminal) -> None:
    """Also between the prompt and the answer, while it is closed, and before the next prompt."""
    for number in range(5):
        long_terminal.type("hello\r")
        time.sleep(0.05 * number)
        for _ in range(4):
            long_terminal.type("\x03")
            time.sleep(0.004)
        time.sleep(0.3)
        long_terminal.type("\x15/system\r")
        long_terminal.until("there is no system prompt")
        long_terminal.until(PROMPT)


def test_stats_are_switched_on_and_off_in_the_chat(long_terminal: Terminal) -> None:
    long_terminal.type("/stats\r")
    long_terminal.until("stats are on")
    long_terminal.until(PROMPT)
    begin_answer(long_terminal)
    long_terminal.until(r"tok/s, .* hits")
    long_terminal.type("\x03")
    long_terminal.until(PROMPT)
    long_terminal.type("/stats\r")
    long_terminal.until("stats are off")
    long_terminal.until(PROMPT)


def test_pasted_lines_are_one_message(chat_path: Path) -> None:
    with Terminal(*MOEPACK, "run", str(chat_path), *SMALL, "-n", "1") as terminal:
        terminal.resize(40, 24)
        terminal.until(PROMPT)
        terminal.type("\x1b[200~a\nbb\n/bye\x1b[201~")
        terminal.until("/bye")
        terminal.type("\r")
        first = terminal.until(r"prompt: (\d+) tokens")
        terminal.until(PROMPT)
        terminal.type("\x1b[A")  # the arrow brings all of it back
        terminal.until("/bye")
        terminal.type("\x03")
        terminal.until(PROMPT)
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    assert first.count("prompt: ") == 1
    assert int(re.findall(r"prompt: (\d+)", first)[0]) > len("<user>a bb /bye")


def test_a_dumb_terminal_gets_no_control_sequences(chat_path: Path) -> None:
    with Terminal(*MOEPACK, "run", str(chat_path), *SMALL, "-n", "3", TERM="dumb") as terminal:
        written = terminal.until("> ")
        terminal.type("hello\r")
        written += terminal.until("answer: 3 tokens")
        written += terminal.until("\n> ")
        time.sleep(0.3)  # it is asked to take each key a moment after it has the prompt
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    assert "\x1b" not in written


def test_a_chat_ends_with_its_server(terminal: Terminal) -> None:
    begin_answer(terminal)
    signal_children(terminal.process.pid, signal.SIGKILL)
    terminal.until("server: ended by SIGKILL")
    assert terminal.process.wait(PATIENCE) == 6
    assert terminal.is_as_usual


@pytest.mark.parametrize("is_answering", [True, False])
def test_a_termination_ends_the_chat_and_not_an_answer_alone(
    is_answering: bool, terminal: Terminal
) -> None:
    if is_answering:
        begin_answer(terminal)
    else:
        terminal.type("hello")
        terminal.until("hello")
        assert not terminal.is_as_usual
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(PATIENCE) == 130
    assert terminal.is_as_usual
