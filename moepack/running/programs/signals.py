"""Signals that reach this process while a program runs for it: they are forwarded to it."""

import os
import signal
from threading import Thread, current_thread, main_thread
from typing import Any, Self

from moepack.running.programs.process import Process

_OF_TERMINALS = {signal.SIGINT, signal.SIGQUIT}
_HANDLED = _OF_TERMINALS | {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_WATCHED = _HANDLED | {signal.SIGCONT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGCHLD}
_ALARM = signal.SIGURG  # otherwise unused, and ignored by default
_JOB_CONTROL = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


class SignalRelay:
    """Forwards signals to a program, and stops when it stops, in a thread of its own.

    It is entered in the main thread before others are started: they leave signals to it then.
    Until a program is attached, signals do here what they always do. `inherited_mask` are those
    that were blocked before, as they are to be in the program.

    The terminal signals the whole process group (Ctrl-C, Ctrl-Z, a new size), so the program has
    these already; signals that others send to this process are forwarded. One that is sent to the
    process group or the control group as a whole reaches the program twice: in a unit of systemd,
    `KillMode=mixed` avoids that.

    A library may have started threads before that block nothing, as numpy's does: a signal that
    reaches one of these comes by a handler of Python's.

    A program that was stopped stops this process as well: the shell waits for this one. While it
    continues, so does the program.
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
        # Whether it is the terminal's is not known here.
        if self._process is not None and not (number in _OF_TERMINALS and _is_in_foreground()):
            self._process.send(number)

    def _wake(self) -> None:
        signal.pthread_kill(self._thread.ident or 0, signal.SIGCHLD)

    def _relay(self) -> None:
        while not self._is_closed:
            received = signal.sigwaitinfo(_WATCHED)
            is_from_kernel = received.si_code > 0  # the terminal's, or about a child
            if received.si_signo == signal.SIGCHLD:
                self._follow()
            elif self._process is None:
                _deliver(received.si_signo)
            elif not is_from_kernel:
                self._process.send(received.si_signo)

    def _follow(self) -> None:
        """Stop if the program was stopped as a shell would have stopped it."""
        number = None if self._process is None else self._process.find_stop()
        if number in _JOB_CONTROL or (number is not None and _is_in_foreground()):
            _deliver(number)


def _deliver(number: int) -> None:
    """Deliver a signal to this process as ever: a handler of Python's runs in the main thread."""
    signal.sigtimedwait({number}, 0)  # one from the terminal may wait, which would be another
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    # A handler of Python's waits for the main thread, which may wait for something else.
    signal.pthread_kill(main_thread().ident or 0, _ALARM)


def _is_in_foreground() -> bool:
    """Return whether this process group has the terminal."""
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
