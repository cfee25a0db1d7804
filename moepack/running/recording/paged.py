"""Recorder in a process of its own, with experts that are read on demand."""

import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError
from moepack.common.sizes import Size
from moepack.pack.reading.pack import Pack
from moepack.running.pager.pager import Pager, PagerOptions
from moepack.running.programs.process import Process
from moepack.running.programs.runner import preloaded_library, program_environment, serving
from moepack.running.programs.trace_writer import origin_of
from moepack.running.recording.recorder import BATCH_COUNT
from moepack.traces.model import Tokens

_PROGRAM = "moepack.running.recording.program"


class PagedRecorder(Closing):
    """A `Recorder` of the model in `pack`, which has to stay open; a context manager.

    `memory` is for experts, as in `PagerOptions`; no weights are repacked. To be made in a thread
    that lives as long. Raises what `Recorder` and `Pager` raise, and what reading experts raises.
    """

    def __init__(
        self, pack: Pack, memory: Size | None, *, context_length: int, threads: int | None
    ) -> None:
        self.context_length = context_length
        self._path = str(pack.path)
        self._failure: MoepackError | None = None
        options = PagerOptions(memory=memory, micro_batch=min(BATCH_COUNT, context_length))
        with ExitStack() as stack:
            library = preloaded_library()
            self.pager = stack.enter_context(Pager(pack, options, self._fail))
            stack.enter_context(serving(self.pager))
            self._start(stack, program_environment(self.pager, library))
            arguments = {
                "context_length": context_length,
                "threads": threads,
                "repack": False,
                "origin": origin_of(pack),
                "opened_path": self.pager.model_path,
            }
            list(self._call(self._path, arguments))
            self._stack = stack.pop_all()

    def _start(self, stack: ExitStack, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._connection = stack.enter_context(Connection(ours.detach()))
        with theirs:
            theirs.set_inheritable(True)
            command = [sys.executable, "-m", _PROGRAM, str(theirs.fileno())]
            # Ctrl-C is for this process, which ends the other one.
            process = Process(Path(sys.executable), command, environment, {signal.SIGINT})
        self._process = stack.enter_context(process)

    def _fail(self, error: MoepackError) -> None:
        self._failure = error

    def _call(self, *call: Any) -> Iterator[Any]:
        """Call the other process; yield its results, or raise its exception."""
        try:
            self._connection.send(call)
            while (result := self._connection.recv()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
        except (EOFError, OSError):
            code = self._process.wait() or 0
            end = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            problem = f"the process that ran the model ended {end}"
            raise self._failure or MachineError(problem, path=self._path) from None
        except MachineError as error:  # llama.cpp could not go on: the pager knows why
            raise self._failure or error from None
        finally:
            self._failure = None

    def close(self) -> None:
        """End the process, and free the memory."""
        self._stack.close()

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, as `Recorder.tokenize`."""
        (tokens,) = self._call("tokenize", text)
        return list(tokens)

    def generate(self, prompt: Sequence[int], count: int, **options: Any) -> Iterator[Tokens]:
        """Yield the experts of a prompt, and of the tokens after it, as `Recorder.generate`."""
        return self._call("generate", prompt, count, options)
