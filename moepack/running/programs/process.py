"""A program that runs in the foreground, and its end."""

import os
import resource
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from select import poll
from typing import Self

from moepack.common.errors import MachineError
from moepack.host.memory_limits import kill_count
from moepack.running.programs.executable import NOT_EXECUTABLE, CommandError

PARENT_VARIABLE = "MOEPACK_PARENT"
"""The variable with this process's id: the preloaded library of a child asks the system by it to
end the child when this process ends."""
_GRACE = 2.0


class Process:
    """A started program. It shares our terminal, process group, and standard streams.

    As a context manager it ends the program when it is left. `descriptor` is readable for `poll`
    and the like once the program has ended.
    """

    def __init__(
        self,
        executable: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        signal_mask: Iterable[int] | None = None,
    ) -> None:
        """Start `executable`; the first of `arguments` is its name.

        `signal_mask` are the signals that it finds blocked: those that are blocked here, if None.
        The thread that calls this is to live as long as the program, which PARENT_VARIABLE
        binds to it. Raises CommandError if the system starts no such file.
        """
        if signal_mask is None:
            signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        names = {**environment, PARENT_VARIABLE: str(os.getpid())}
        # Unlike `subprocess` it can give the mask, and copies no page tables of a large process.
        try:
            self.pid = os.posix_spawn(
                executable,
                tuple(arguments),
                names,
                setsigmask=signal_mask,
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
        """Return the signal that stopped the program, once for each stop; None without one."""
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
        """End the program: it is asked to, and killed if it does not within two seconds."""
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


def is_out_of_memory(returncode: int, kills_before: int) -> bool:
    """Return whether a program that ended so was killed to free memory.

    `kills_before` is `kill_count` before it started. A shell ends with 137 after a killed program.
    """
    was_killed = returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return was_killed and kill_count() > kills_before


def end_like(returncode: int) -> int:
    """End this process by the signal that killed a program, or return the exit code it ended with.

    A shell script that is interrupted goes on if what it called ends otherwise than by the signal.
    To be called last, when all output was written: nothing is cleaned up.
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
