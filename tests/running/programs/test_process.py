"""A program is started, asked and ended; how it ended is known, and gone through with."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moepack.running.programs.executable import CommandError, find_executable
from moepack.running.programs.process import Process
from tests.support.children import PATIENCE, Piped, wait_until
from tests.support.foreground import MODULE

ENVIRONMENT = dict(os.environ)


def start(*arguments: str, **names: str) -> Process:
    return Process(find_executable(arguments[0]), arguments, ENVIRONMENT | names)


def in_foreground(*arguments: str, **options: object) -> Piped:
    """Run a command in the foreground of another process; its first output is the program's id."""
    return Piped(*MODULE, *arguments, **options)


def program_of(run: Piped) -> int:
    return int(run.stderr.readline().split()[1])


@pytest.mark.parametrize(
    ("script", "returncode"), [("exit 0", 0), ("exit 255", 255), ("kill -USR1 $$", -10)]
)
def test_how_a_program_ended_is_known(script: str, returncode: int) -> None:
    with start("sh", "-c", script) as process:
        assert select.select([process.descriptor], [], [], PATIENCE)[0]
        assert process.poll() == returncode
        assert process.poll() == process.wait() == returncode
        process.send(signal.SIGTERM)  # is nobody's
    process.send(signal.SIGTERM)


def test_while_it_runs_nothing_is_known() -> None:
    with start("sleep", "60") as process:
        assert process.poll() is None
        assert process.wait(0.01) is None
        assert not select.select([process.descriptor], [], [], 0)[0]
    assert process.poll() == -signal.SIGTERM


def test_who_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepack.running.programs.process._GRACE", 0.05)
    ready = tmp_path / "ready"
    script = f"trap '' TERM; : > {ready}; while :; do sleep 60; done"
    with start("sh", "-c", script) as process:
        wait_until(ready.exists)
    assert process.poll() == -signal.SIGKILL


def test_a_stopped_program_is_ended_in_time() -> None:
    with start("sleep", "60") as process:
        process.send(signal.SIGSTOP)
        wait_until(lambda: process.find_stop() == signal.SIGSTOP)
        assert process.find_stop() is None
        process.end()
        assert process.poll() == -signal.SIGTERM
        assert process.find_stop() is None


def test_the_program_is_in_our_group_and_ends_with_us(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; print(os.getpgrp(), os.getppid(), os.environ['MOEPACK_PARENT'])"
    with start(sys.executable, "-c", code) as process:
        assert process.wait() == 0
    numbers = [int(word) for word in capfd.readouterr().out.split()]
    assert numbers == [os.getpgrp(), os.getpid(), os.getpid()]


def test_what_the_system_does_not_start_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no program\n")
    text.chmod(0o755)
    with pytest.raises(CommandError, match="cannot be started: Exec format error") as caught:
        start(str(text))
    assert caught.value.exit_code == 126


def test_a_signal_for_the_command_alone_reaches_the_program_once() -> None:
    names = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "CONT")
    numbers = [int(signal.Signals[f"SIG{name}"]) for name in names]
    code = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {numbers})
print("ready", flush=True)
while received := signal.sigtimedwait({numbers}, 60):
    print(received.si_signo, flush=True)
"""
    run = in_foreground(sys.executable, "-c", code, start_new_session=True)
    assert run.stdout.readline() == "ready\n"
    for number in numbers:
        run.send_signal(number)
        assert run.stdout.readline() == f"{number}\n"
    time.sleep(0.05)  # in which one that came twice would be printed
    os.kill(program_of(run), signal.SIGKILL)
    assert run.communicate(timeout=PATIENCE)[0] == ""
    assert run.returncode == -signal.SIGKILL


def test_ignored_signals_stay_ignored() -> None:
    script = "trap '' HUP; exec \"$@\""
    program = (*MODULE, "/bin/sh", "-c", "kill -HUP $$; kill -HUP $PPID; sleep 0.1; echo alive")
    run = subprocess.run(
        ["sh", "-c", script, "sh", *program], capture_output=True, timeout=PATIENCE
    )
    assert run.stdout == b"alive\n"
    assert run.returncode == 0


def test_a_stopped_program_stops_the_command_and_goes_on_with_it() -> None:
    """Without a terminal: by the signal, as a supervisor does it."""
    run = in_foreground("/bin/sh", "-c", "kill -TSTP $$; exit 5", process_group=0)
    result = os.waitid(os.P_PID, run.pid, os.WSTOPPED)
    assert result is not None
    assert result.si_status == signal.SIGTSTP
    run.send_signal(signal.SIGCONT)
    run.communicate(timeout=PATIENCE)
    assert run.returncode == 5


def test_a_program_that_a_person_freezes_freezes_nothing_else() -> None:
    run = in_foreground("/bin/sleep", "60", start_new_session=True)
    pid = program_of(run)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    assert os.waitid(os.P_PID, run.pid, os.WSTOPPED | os.WNOHANG) is None
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGTERM)
    run.communicate(timeout=PATIENCE)
    assert run.returncode == -signal.SIGTERM
