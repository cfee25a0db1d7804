"""The chat of `run`: in a pipe, and on a terminal of its own."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moepack.cli import slash_commands
from tests.support.chat_model import write_chat_model
from tests.support.children import PATIENCE
from tests.support.models import first_shard, flip, pack_model
from tests.support.needs import needs_llama
from tests.support.terminals import MOEPACK, Terminal, plain

pytestmark = [
    pytest.mark.long,
    needs_llama,
]

Command = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--memory", "floor", "--threads", "1", "--temperature", "0", "--seed", "7")
LONG = "x" * 300
"""A line that has no room in a context of 64 tokens."""
QUESTIONS = (
    "{%- for message in messages if message.role == 'user' -%}"
    "<{{ message.content | replace('\n', '|') }}>{%- endfor -%}"
)


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a template for chats."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "chat.gguf")


def answers(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the tokens of each answer, its speed left out, or which error ended it."""
    lines = run.stderr.splitlines()[1:]
    lines = [line for line in lines if not line.startswith("prompt: ")]
    return [line.partition(",")[0].removeprefix("answer: ") for line in lines]


def test_an_outgrown_context_ends_the_answer_and_clear_begins_anew(
    moepack_command: Command, chat_path: Path
) -> None:
    lines = f"hello\n{LONG}\n /clear \nhello\n"
    arguments = ("run", chat_path, "-n", "3", "--context", "64", *SMALL)
    run = moepack_command(*arguments, input=lines)
    assert answers(run) == [
        "3 tokens",
        "error: the prompt does not fit into the context",
        "hint: give it more with --context",
        "hint: /clear forgets what was said so far",
        "3 tokens",
    ]
    assert run.returncode == 2, "where nobody sees the error, the exit code tells of it"
    alone = moepack_command(*arguments, "-p", "hello")
    assert run.stdout == alone.stdout * 2


def test_a_question_without_an_answer_is_forgotten(
    moepack_command: Command, chat_path: Path
) -> None:
    arguments = ("run", chat_path, "-n", "3", "--context", "64", *SMALL)
    plain = moepack_command(*arguments, input="a\nb\n")
    run = moepack_command(*arguments, input=f"a\n{LONG}\nb\n")
    assert (plain.returncode, run.returncode) == (0, 2)
    assert run.stdout == plain.stdout
    assert run.stderr.count("answer: 3 tokens") == 2


def test_messages_that_the_template_refuses_end_an_answer_alone(
    moepack_command: Command, chat_path: Path
) -> None:
    run = moepack_command("run", chat_path, "-n", "3", "-q", *SMALL, input="refuse\nhello\n")
    problem = "the model's chat template refuses the messages: not this"
    assert run.stderr == f"error: {problem}\n"
    assert run.returncode == 2
    assert run.stdout.startswith(
        moepack_command("run", chat_path, "-n", "3", "-q", *SMALL, "-p", "hello").stdout
    )


def test_a_damaged_expert_ends_an_answer_alone(
    moepack_command: Command, chat_path: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "pack"
    pack_model([chat_path], pack)
    for path in pack.glob("experts-*.bin"):
        for offset in range(5, path.stat().st_size, 4096):
            flip(path, offset)
    run = moepack_command("run", pack, "-n", "3", "-q", *SMALL, input="hello\n\nagain\n")
    errors = run.stderr.splitlines()[::2]
    assert len(errors) == 2, run.stderr
    assert all(error.startswith("error: ") and "digest" in error for error in errors)
    assert (run.returncode, run.stdout) == (4, "")


def test_what_no_answer_would_have_is_said_before_the_first(moepack_command: Command) -> None:
    run = moepack_command("run", first_shard("qwen3moe"), *SMALL, input="hello\nand again\n")
    assert run.returncode == 2
    error = f"error: {first_shard('qwen3moe')}: the model has no template for chats\n"
    assert run.stderr.count("error: ") == run.stderr.count(error) == 1


def test_lines_that_are_no_text_are_answered(moepack_command: Command, chat_path: Path) -> None:
    arguments = ("run", chat_path, "-n", "3", *SMALL)
    run = moepack_command(*arguments, input="a\udcff\n", errors="surrogateescape")
    assert (run.returncode, answers(run)) == (0, ["3 tokens"]), run.stderr


def test_a_schema_and_biases_hold_for_answers(moepack_command: Command, chat_path: Path) -> None:
    arguments = ("run", chat_path, "-n", "8", "-c", "256", "-q", *SMALL)
    for more in (("-p", "hello"), ("-p", "hello", "--raw"), ()):
        schema = moepack_command(*arguments, *more, "-j", '{"const": 12345678901}', input="hello\n")
        assert schema.stdout.strip()
        assert "12345678901".startswith(schema.stdout.strip())
        plainly = moepack_command(*arguments, *more, input="hello\n")
        bias = moepack_command(*arguments, *more, "-l", "70+100", input="hello\n")
        assert len(set(bias.stdout.strip())) == 1
        assert bias.stdout != plainly.stdout


def test_quotes_hold_several_lines_together(moepack_command: Command, chat_path: Path) -> None:
    """They are one message, and none of them is a command; the end of a pipe ends it as well."""
    arguments = ("run", chat_path, "-n", "3", "-c", "256", "-q", *SMALL)
    lines = "a\n/clear\n\nb"
    alone = moepack_command(*arguments, "-p", lines).stdout
    for text in (
        f'"""{lines}"""\n',
        f'"""\n{lines}\n"""\n',
        f'  """{lines}\n""" \n',
        f'"""\n{lines}',
    ):
        run = moepack_command(*arguments, input=text)
        assert (run.returncode, run.stdout) == (0, alone), text


def test_what_is_quoted_is_no_command(moepack_command: Command, chat_path: Path) -> None:
    arguments = ("run", chat_path, "-n", "3", "-c", "256", "-q", *SMALL)
    for word in ("/bye", "/nothing"):
        run = moepack_command(*arguments, input=f'"""{word}"""\n')
        alone = moepack_command(*arguments, "-p", word)
        assert (run.returncode, run.stdout) == (0, alone.stdout)


def test_a_command_of_a_chat_is_obeyed_and_never_sent(
    moepack_command: Command, chat_path: Path
) -> None:
    arguments = ("run", chat_path, "-n", "3", "--context", "256", *SMALL)
    alone = moepack_command(*arguments, input="hello\n")
    run = moepack_command(*arguments, input="hello\n/help\n/?\n/nothing\n/clear it\n/bye\nno\n")
    assert (run.returncode, run.stdout) == (2, alone.stdout)
    assert run.stderr.count("/regen  ") == 2
    assert "error: no command of a chat: /nothing\n" in run.stderr
    assert "hint: there are /help /regen /system /clear /stats /bye; " in run.stderr
    assert "error: /clear takes nothing behind it, found it\n" in run.stderr
    assert run.stderr.count("answer: ") == 1


@pytest.mark.parametrize("text", ["/help\nline two", "/clear\n/bye", "/nothing\nat all\n"])
def test_several_lines_are_no_command(text: str) -> None:
    assert slash_commands.parse(text) is None
    assert slash_commands.parse("/system be\nbrief") == ("system", "be\nbrief")
    assert slash_commands.parse(" /help\n") == ("help", "")


def test_a_path_is_no_command(moepack_command: Command, chat_path: Path) -> None:
    run = moepack_command("run", chat_path, "-n", "3", *SMALL, input="/etc/hosts is a file\n")
    assert (run.returncode, answers(run)) == (0, ["3 tokens"])


def test_an_answer_is_computed_again_with_another_seed(
    moepack_command: Command, chat_path: Path
) -> None:
    warm = ("--memory", "floor", "-t", "1", "--temp", "2", "-c", "256", "-n", "9")
    run = moepack_command("run", chat_path, *warm, "-s", "5", input="/regen\nhello\n/regen\nand?\n")
    assert run.stderr.count("error: nothing has been answered yet") == 1
    assert re.findall(r"seed (\d+)", run.stderr) == ["5", "6", "5"]
    texts = [
        moepack_command("run", chat_path, *warm, "-s", seed, "-p", "hello").stdout
        for seed in ("5", "6")
    ]
    assert run.stdout.startswith("".join(texts))
    assert texts[0] != texts[1]


def test_what_the_model_is_told_is_shown_and_changed(
    moepack_command: Command, chat_path: Path
) -> None:
    arguments = ("run", chat_path, "-n", "5", "-c", "256", *SMALL)
    run = moepack_command(
        *arguments, input='/system\n/system be brief\n/system\nhello\n/clear\n/system ""\nhello\n'
    )
    told = moepack_command(*arguments, "-p", "hello", "--system", "be brief")
    plainly = moepack_command(*arguments, "-p", "hello")
    assert run.stdout == told.stdout + plainly.stdout
    shown = [line for line in run.stderr.splitlines()[1:] if ":" not in line]
    assert shown == ["the model is told nothing before all else", "be brief"]


ENDLESS = ("--context", "2048", "--ignore-eos")
"""Answers that end with the context alone: after seconds."""
PROMPT = r"\x1b\[\?2004h[^\n]*>"
"""What a terminal gets when it is to be typed at."""


@pytest.fixture
def terminal(chat_path: Path) -> Iterator[Terminal]:
    """Begin a chat."""
    terminal = Terminal(*MOEPACK, "run", str(chat_path), *SMALL, *ENDLESS)
    try:
        yield terminal
    finally:
        terminal.close()


def begin_answer(terminal: Terminal, text: str = "hello") -> None:
    """Say something, and wait until it is being answered."""
    terminal.type(f"{text}\r")
    terminal.until(rf"{text}[^\n]*\n")  # as it was typed
    terminal.until(r"\x1b\[\?2004l[^\x1b]")


def signal_children(process_id: int, number: signal.Signals) -> None:
    """Send a signal to the processes that one has started."""
    for path in Path(f"/proc/{process_id}/task").glob("*/children"):
        for child in path.read_text().split():
            os.kill(int(child), number)


def test_ctrl_c_ends_an_answer_and_never_the_chat(terminal: Terminal) -> None:
    terminal.until("/help says what else there is")
    terminal.until(PROMPT)
    for _ in range(3):
        begin_answer(terminal)
        terminal.type("\x03" * 2)
        said = terminal.until(PROMPT)
        assert "; interrupted" in " ".join(plain(said).split())
    terminal.type("and\x03")
    terminal.until("Ctrl-D or /bye ends the chat")
    terminal.until(PROMPT)
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0


def test_a_chat_ends_with_its_server(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    begin_answer(terminal)
    signal_children(terminal.process.pid, signal.SIGKILL)
    terminal.until("server: ended by SIGKILL")
    assert terminal.process.wait(PATIENCE) == 6
    assert terminal.is_as_usual


def test_what_the_next_answer_waits_for_is_shown(terminal: Terminal) -> None:
    """An answer that is left is computed for a while: here until its server goes on."""
    terminal.until(PROMPT)
    begin_answer(terminal)
    signal_children(terminal.process.pid, signal.SIGSTOP)
    terminal.type("\x03")
    terminal.until(PROMPT)
    terminal.type("hello\r")
    terminal.until("ending the answer before")
    signal_children(terminal.process.pid, signal.SIGCONT)
    time.sleep(0.3)
    terminal.type("\x03")
    terminal.until(r"\binterrupted")


def test_ctrl_c_at_any_moment_leaves_the_chat_as_it_was(terminal: Terminal) -> None:
    """Also between the prompt and the answer, while it is closed, and before the next prompt."""
    terminal.until(PROMPT)
    for number in range(6):
        terminal.type("hello\r")
        time.sleep(0.04 * number)
        for _ in range(4):
            terminal.type("\x03")
            time.sleep(0.004)
        time.sleep(0.3)
        terminal.type("\x15/system\r")
        terminal.until("is told nothing before")
        terminal.until(PROMPT)
    terminal.type("/bye\r")
    assert terminal.process.wait(PATIENCE) == 0


def test_a_signal_that_interrupts_the_prompt_clears_the_line(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    terminal.type("hello")
    terminal.until("hello")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("Ctrl-D or /bye ends the chat")
    terminal.until(PROMPT)
    terminal.type("/bye\r")
    assert terminal.process.wait(PATIENCE) == 0


def test_pasted_lines_are_one_message(chat_path: Path) -> None:
    terminal = Terminal(*MOEPACK, "run", str(chat_path), *SMALL, "-n", "1", columns=40)
    try:
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
        terminal.type("x\r")
        terminal.until(r"prompt: (\d+) tokens")
    finally:
        terminal.close()
    assert first.count("prompt: ") == 1
    assert int(re.findall(r"prompt: (\d+)", first)[0]) > len("<user>a bb /bye")


def test_stats_are_switched_on_in_the_chat(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    terminal.type("/stats\r")
    terminal.until("stats are on")
    terminal.until(PROMPT)
    begin_answer(terminal)
    terminal.until(r"tok/s, .* hits")
    terminal.type("\x03")
    terminal.until(PROMPT)


def test_a_dumb_terminal_gets_no_control_sequences(chat_path: Path) -> None:
    terminal = Terminal(*MOEPACK, "run", str(chat_path), *SMALL, "-n", "3", TERM="dumb")
    try:
        written = terminal.until("> ")
        terminal.type("hello\r")
        written += terminal.until("answer: 3 tokens")
        written += terminal.until("\n> ")
        time.sleep(0.3)  # it is asked to take each key a moment after it has the prompt
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.close()
    assert "\x1b" not in written


def test_a_termination_ends_the_chat_and_not_an_answer_alone(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    begin_answer(terminal)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(PATIENCE) == 130


def test_a_termination_at_the_prompt_ends_the_chat(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    terminal.type("hello")
    terminal.until("hello")
    assert not terminal.is_as_usual
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(PATIENCE) == 130
    assert terminal.is_as_usual


def test_a_terminal_is_not_asked_where_its_cursor_is(terminal: Terminal) -> None:
    """Some never answer."""
    written = terminal.until(PROMPT)
    terminal.type("hello")
    assert "\x1b[6n" not in written + terminal.until("hello")


def test_the_line_that_is_typed_has_no_colours(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    terminal.type("hello\x03")
    written = terminal.until(PROMPT)
    assert re.findall(r"\x1b\[[0-9;]*m", written).count("\x1b[0m") > 0
    assert not re.search(r"\x1b\[(?!0m)[0-9;]*m", written)
