"""A program that runs in the foreground: its start, the signals that it gets, and its end."""

import os
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from select import poll
from typing import Any, Self

from moepack.common.errors import MachineError
from moepack.host.memory_limits import kill_count
from moepack.running.programs.executable import NOT_EXECUTABLE, CommandError

PARENT_VARIABLE = "MOEPACK_PARENT"
"""The variable with this process's id: the preloaded library of a child asks the system by it to
end the child when this process ends."""
_GRACE = 2.0
_OF_TERMINALS = {signal.SIGINT, signal.SIGQUIT, signal.SIGCONT}
"""Signals that a terminal or its shell sends to all processes of a job."""
_FORWARDED = _OF_TERMINALS | {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_JOB_CONTROL = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


class Process:
    """A started program. It shares our terminal, process group, and standard streams.

    As a context manager it ends the program when it is left. `descriptor` is readable for `poll`
    and the like once the program has ended.
    """

    def __init__(
        self, executable: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Start `executable`; the first of `arguments` is its name.

        The calling thread must live as long as the program, which PARENT_VARIABLE binds to it.
        Raises CommandError if the system starts no such file.
        """
        names = {**environment, PARENT_VARIABLE: str(os.getpid())}
        # Unlike `subprocess` it copies no page tables of a large process.
        try:
            self.pid = os.posix_spawn(
                executable,
                tuple(arguments),
                names,
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # which Python ignores
            )
        except OSError as error:
            problem = f"cannot be started: {error.strerror}"
            raise CommandError(problem, path=executable, exit_code=NOT_EXECUTABLE) from None
        self._returncode: int | None = None
        try:
            self.descriptor = os.pidfd_open(self.pid)
        except OSError as error:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            problem = f"no descriptor of a process: {error.strerror}"
            raise MachineError(problem, hint="Linux 5.3 has them (pidfd_open)") from None

    def poll(self) -> int | None:
        """Return the program's exit code, or -N if signal N killed it; None while it runs."""
        if self._returncode is None:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
            if result is not None:
                is_exit = result.si_code == os.CLD_EXITED
                self._returncode = result.si_status if is_exit else -result.si_status
        return self._returncode

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the program ends, for at most `seconds`, and return the result of `poll`."""
        if self._returncode is None:
            ending = poll()
            ending.register(self.descriptor)
            ending.poll(None if seconds is None else seconds * 1000)
        return self.poll()

    def find_stop(self) -> int | None:
        """Return the signal that stopped the program, once for each stop."""
        if self._returncode is not None:
            return None
        try:
            result = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:  # it has ended meanwhile
            return None
        return None if result is None else result.si_status

    def send(self, number: int) -> None:
        """Send a signal to the program, unless it has ended."""
        with suppress(ProcessLookupError):
            if self._returncode is None:  # else the descriptor may be closed, or another file's
                signal.pidfd_send_signal(self.descriptor, number)

    def end(self) -> None:
        """End the program by SIGTERM, and two seconds later by SIGKILL."""
        if self.poll() is None:
            self.send(signal.SIGTERM)
            self.send(signal.SIGCONT)  # a stopped program gets no other signal
            if self.wait(_GRACE) is None:
                self.send(signal.SIGKILL)
                self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        os.close(self.descriptor)


@contextmanager
def in_foreground(
    executable: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Process]:
    """Start a program in the foreground, and forward signals to it until the block ends.

    Call it in the main thread, which has to run Python now and then. The terminal signals the whole
    process group (Ctrl-C, Ctrl-Z, a new size), so the program has these already; signals that
    others send to this process are forwarded. One that is sent to the process group or the control
    group as a whole reaches the program twice: in a unit of systemd, `KillMode=mixed` avoids that.
    A stopped program stops this process as well, for which the shell waits. Raises what `Process`
    raises.
    """
    # A process that ignores the ends of children, which is inherited, would not learn how they end.
    handlers: dict[int, Any] = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
    try:
        with Process(executable, arguments, environment) as process:

            def forward(number: int, frame: object) -> None:
                # Python does not tell whether it is the terminal's.
                if not (number in _OF_TERMINALS and _is_in_foreground()):
                    process.send(number)

            def follow(number: int, frame: object) -> None:
                stop = process.find_stop()
                if stop is not None and (stop in _JOB_CONTROL or _is_in_foreground()):
                    os.kill(os.getpid(), stop)

            for number in _FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    handlers[number] = signal.signal(number, forward)
            signal.signal(signal.SIGCHLD, follow)
            follow(signal.SIGCHLD, None)  # it may have stopped already
            yield process
    finally:
        for handled, handler in handlers.items():
            signal.signal(handled, handler)


def _is_in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def is_out_of_memory(returncode: int, kills_before: int) -> bool:
    """Return whether a program with this exit code was killed to free memory.

    `kills_before` is `kill_count` before it started. A shell ends with 137 after a killed program.
    """
    was_killed = returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return was_killed and kill_count() > kills_before


def end_like(returncode: int) -> int:
    """End this process by the signal that killed a program, or return the exit code it ended with.

    An interrupted shell script continues unless the program that it called ends by the signal. Call
    it last, when all output is written: nothing is cleaned up.
    """
    if returncode >= 0:
        return returncode
    number = -returncode
    # The program's dump of memory says what happened, ours would be written over it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number  # as the first process of a container, which signals do not kill
