"""A program that runs in the foreground: its start, the signals that it gets, and its end."""

import os
import resource
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from select import poll
from threading import Thread, current_thread, main_thread
from typing import Any, Self

from moepack.common.errors import MachineError
from moepack.host.memory_limits import kill_count
from moepack.running.programs.executable import NOT_EXECUTABLE, CommandError

PARENT_VARIABLE = "MOEPACK_PARENT"
"""The variable with this process's id: the preloaded library of a child asks the system by it to
end the child when this process ends."""
_GRACE = 2.0
_OF_TERMINALS = {signal.SIGINT, signal.SIGQUIT}
_HANDLED = _OF_TERMINALS | {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_WATCHED = _HANDLED | {signal.SIGCONT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGCHLD}
_ALARM = signal.SIGURG  # otherwise unused, and ignored by default
_JOB_CONTROL = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


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
        signal_mask: Iterable[int],
    ) -> None:
        """Start `executable`; the first of `arguments` is its name.

        `signal_mask` are the signals that are blocked in it. The calling thread must live as long
        as the program, which PARENT_VARIABLE binds to it. Raises CommandError if the system starts
        no such file.
        """
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


class SignalRelay:
    """Forwards signals to a program, and stops when it stops, in a thread of its own.

    Enter it in the main thread before others are started: then they leave signals to it. Until a
    program is attached, signals act on this process as always. `inherited_mask` are the signals
    that were blocked before, for the program.

    The terminal signals the whole process group (Ctrl-C, Ctrl-Z, a new size), so the program has
    these already; signals that others send to this process are forwarded. One that is sent to the
    process group or the control group as a whole reaches the program twice: in a unit of systemd,
    `KillMode=mixed` avoids that.

    Threads that a library started earlier, as numpy's does, block nothing: a signal that reaches
    one of them comes by a handler of Python's.

    A stopped program stops this process as well, for which the shell waits. Both continue together.
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._is_closed = False
        self._handlers: dict[int, Any] = {}
        self._thread = Thread(target=self._relay, name="signals", daemon=True)

    def __enter__(self) -> Self:
        assert current_thread() is main_thread()
        # A process that ignores the ends of children, which is inherited, gets no signal of them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._on_alarm = signal.signal(_ALARM, lambda *_: None)
        self.inherited_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        self._thread.start()
        return self

    def attach(self, process: Process) -> None:
        """Forward signals to `process` from now on."""
        self._process = process
        for number in _HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle)
        self._wake()  # it may have stopped already

    def __exit__(self, *exception: object) -> None:
        self._is_closed = True
        self._wake()
        self._thread.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.inherited_mask)
        signal.signal(_ALARM, self._on_alarm)

    def _handle(self, number: int, frame: object) -> None:
        # Python does not tell whether it is the terminal's.
        if self._process is not None and not (number in _OF_TERMINALS and _is_in_foreground()):
            self._process.send(number)

    def _wake(self) -> None:
        signal.pthread_kill(self._thread.ident or 0, signal.SIGCHLD)

    def _relay(self) -> None:
        while not self._is_closed:
            received = signal.sigwaitinfo(_WATCHED)
            is_from_kernel = received.si_code > 0  # the terminal's, or about a child
            if received.si_signo == signal.SIGCHLD:
                # Stop if the program was stopped as a shell would have stopped it.
                number = None if self._process is None else self._process.find_stop()
                if number in _JOB_CONTROL or (number is not None and _is_in_foreground()):
                    _deliver(number)
            elif self._process is None:
                _deliver(received.si_signo)
            elif not is_from_kernel:
                self._process.send(received.si_signo)


def run_in_foreground(
    executable: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> int:
    """Run a program to its end, with this process's terminal and signals; return `Process.poll`.

    Call it in the main thread. Raises CommandError if the system starts no such file.
    """
    with (
        SignalRelay() as relay,
        Process(executable, arguments, environment, relay.inherited_mask) as process,
    ):
        relay.attach(process)
        returncode = process.wait()
    assert returncode is not None
    return returncode


def _deliver(number: int) -> None:
    """Deliver a signal to this process as ever: a handler of Python's runs in the main thread."""
    signal.sigtimedwait({number}, 0)  # one from the terminal may wait, which would be another
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    # A handler of Python's waits for the main thread, which may wait for something else.
    signal.pthread_kill(main_thread().ident or 0, _ALARM)


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
