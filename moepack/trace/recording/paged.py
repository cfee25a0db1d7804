"""Records in a process of its own, to which experts are brought when they are chosen."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from moepack.errors import MachineError, MoepackError
from moepack.pager.background import PagerThread
from moepack.pager.pager import Pager, PagerOptions
from moepack.programs.process import Process
from moepack.programs.runner import preloaded_library, program_environment
from moepack.programs.trace_writer import origin_of_pack
from moepack.reading.pack import Pack
from moepack.sizes import Size
from moepack.trace.model import Tokens
from moepack.trace.recording.recorder import BATCH_COUNT

_PROGRAM = "moepack.trace.recording.program"


class PagedRecorder:
    """A `Recorder` of the model in `pack`, which has to stay open; a context manager.

    `memory` is for experts, as in `PagerOptions`; no weights are repacked. To be made in a thread
    that lives as long. Raises what `Recorder` and `Pager` raise, and what reading experts raises.
    """

    def __init__(
        self,
        pack: Pack,
        memory: Size | None,
        *,
        context_length: int,
        threads: int | None,
    ) -> None:
        self.context_length = context_length
        self._path = str(pack.path)
        self._failure: MoepackError | None = None
        options = PagerOptions(memory=memory, micro_batch=min(BATCH_COUNT, context_length))
        with ExitStack() as stack:
            library = preloaded_library()
            self.pager = stack.enter_context(Pager(pack, options, self._fail))
            stack.enter_context(PagerThread(self.pager))
            self._start(stack, program_environment(self.pager, library))
            arguments = {
                "context_length": context_length,
                "threads": threads,
                "repack": False,
                "origin": origin_of_pack(pack),
                "opened_path": self.pager.model_path,
            }
            for _ in self._results(self._path, arguments):
                pass
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

    def _results(self, *call: Any) -> Iterator[Any]:
        """Yield what the other process answers to a call. Raises what it raises."""
        try:
            self._connection.send(call)
            while (result := self._connection.recv()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
        except (EOFError, OSError) as error:
            raise self._failure or self._ended(error) from None
        except MachineError as error:  # llama.cpp could not go on: the pager knows why
            raise self._failure or error from None
        finally:
            self._failure = None

    def _ended(self, error: Exception) -> MoepackError:
        code = self._process.wait()
        assert code is not None
        reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return MachineError(f"the process that ran the model ended {reason}", path=self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, as `Recorder.tokenize`."""
        (tokens,) = self._results("tokenize", text)
        return list(tokens)

    def generate(self, prompt: Sequence[int], count: int, **options: Any) -> Iterator[Tokens]:
        """Yield what was chosen for a prompt, and for what follows, as `Recorder.generate`."""
        return self._results("generate", prompt, count, options)
