"""A supervisor in a thread, and programs that it serves."""

import json
import mmap
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import Any, Self

import moepack
from moepack.common.errors import MoepackError
from moepack.common.shape import ExpertKey
from moepack.pack.engines.stock_gguf import lay_out
from moepack.pack.opening.open_model import open_model
from moepack.running.programs.runner import preloaded_library
from moepack.running.streaming.mapped_model import map_model
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor
from moepack.running.streaming.table import ExpertTable
from tests.support.children import MOEPACK, PATIENCE, Piped
from tests.support.models import FIXTURES

ROOT = FIXTURES.parent
_LLAMA = "llama_program"
SLOTS = ("--slots", 4, "--micro-batch", 32)
"""Options of a program that answers four texts at once."""

Answers = list[Any] | str
"""`Answer`s of `llama_program` as JSON, for each of several models if there are more."""
Alone = Callable[[str], list[Answers]]
"""The fixture `alone`."""
Form = Callable[[str, str], Path]
"""The fixture `form`."""

PROMPTS: tuple[tuple[Sequence[int], ...], ...] = (
    ([7],),
    ([(31 * number * number + 5) % 500 for number in range(90)],),
    ([1, 5, 9, 44], [7, 7, 7], list(range(3, 70)), [9]),
)
"""What programs are asked: a token, several micro-batches of 32, four texts at once."""


class Program:
    """A llama.cpp program that is asked line by line; a context manager, which ends it."""

    def __init__(
        self, model: str | Path, *options: object, module: str = _LLAMA, **names: str
    ) -> None:
        self._start((*_start_of(module), model, *options), names)

    def _start(self, command: Sequence[object], names: dict[str, str], **options: Any) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115
        names = os.environ | names
        self.process = Piped(*command, stderr=self._errors, cwd=ROOT, env=names, **options)

    def wait_ready(self) -> Self:
        """Wait until the model is loaded."""
        line = self.process.stdout.readline()
        assert line == "ready\n", line + self.complaint
        return self

    def call(self, *arguments: object) -> Any:
        """Ask a program of another kind something; return its result, None where it has ended."""
        self.begin(*arguments)
        return self.result()

    def ask(self, *prompts: Sequence[int]) -> Answers:
        """Have prompts continued at once; return the answers, or what the server says instead."""
        self.begin(*prompts)
        return self.answers()

    def answers(self) -> Answers:
        """Wait for answers, or for what the server says instead."""
        result: Answers = self.result()
        assert result is not None, self.complaint
        return result

    @property
    def has_answered(self) -> bool:
        """Whether it has answered, or ended."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def begin(self, *prompts: object) -> None:
        """Ask, and wait for nothing."""
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()

    def result_line(self) -> str:
        """Wait for the next line; an empty one where the program has ended."""
        return self.process.stdout.readline()

    def result(self) -> Any:
        """Wait for the next answer; None where the program has ended."""
        line = self.result_line()
        return json.loads(line) if line else None

    @property
    def complaint(self) -> str:
        """What it wrote to standard error so far."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def __enter__(self) -> Self:
        return self.wait_ready()

    def __exit__(self, *exception: object) -> None:
        with self._errors:
            if any(exception) or self.process.poll() is not None:
                self.process.kill()
            self.process.communicate(timeout=PATIENCE)


class Command(Program):
    """`moepack run` with such a program, in a process group of its own."""

    def __init__(self, *words: str | Path, **names: str) -> None:
        self._start((*MOEPACK, "run", *words), names, start_new_session=True)


def _start_of(module: str) -> list[str]:
    """Return the command for a module of this folder, or for a script of node in it."""
    if module.endswith(".mjs"):
        return ["node", f"tests/support/{module}"]
    return [sys.executable, "-m", f"tests.support.{module}"]


def _environment(supervisor: Supervisor) -> dict[str, str]:
    return {**supervisor.environment, "LD_PRELOAD": str(preloaded_library())}


def chooser(
    ggml: Path, model: Path, supervisor: Supervisor, before: Path | None = None, **variables: str
) -> Program:
    """Start a program whose routers select as they are told, with experts of `model` mapped."""
    with open_model([model]) as pack:
        shard = pack.locate(0, 0, "ffn_gate_exps.weight").path
    length = os.path.getsize(shard)
    names = {**variables, **_environment(supervisor)}
    if before is not None:
        names["LD_PRELOAD"] = f"{before}:{names['LD_PRELOAD']}"
    return Program(shard, ggml, length, module="chooser", **names)


def slot_lengths(model: Path) -> Mapping[ExpertKey, int]:
    """Return the bytes that each expert takes in memory."""
    with open_model([model]) as pack, closing(map_model(pack)) as mapped:
        return ExpertTable(pack, mapped).slot_lengths


def slots_of(process: int) -> Path:
    """Return the file that a program maps slots of."""
    files = Path(f"/proc/{process}/fd").iterdir()
    return next(file for file in files if "moepack-experts" in os.readlink(file))


def length_of(file: Path) -> int:
    """Return the bytes of memory, or of a drive, that a file takes."""
    return file.stat().st_blocks * 512


def answers(program: Program) -> list[Answers]:
    """Return what a program answers to PROMPTS."""
    return [program.ask(*prompts) for prompts in PROMPTS]


class Supervised:
    """A supervisor that serves in a thread, and the errors for which programs could not go on."""

    def __init__(self, supervisor: Supervisor, failures: list[MoepackError]) -> None:
        self.supervisor, self.failures = supervisor, failures
        self._jobs: SimpleQueue[Callable[[Supervisor], None] | None] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._programs: list[Program] = []
        self._problem: BaseException | None = None
        self._done = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that programs get."""
        return _environment(self.supervisor)

    def program(
        self, *options: object, module: str = _LLAMA, before: Path | None = None, **names: str
    ) -> Program:
        """Start a program that it serves: a module of this folder, or a script of node.

        The library `before` is loaded before the seam.
        """
        names = {**names, **self.environment}
        if before is not None:
            names["LD_PRELOAD"] = f"{before}:{names['LD_PRELOAD']}"
        program = Program(self.supervisor.model_path, *options, module=module, **names)
        self._programs.append(program)
        return program

    def chooser(
        self, ggml: Path, model: Path, before: Path | None = None, **variables: str
    ) -> Program:
        """Start a program whose routers select as they are told."""
        return chooser(ggml, model, self.supervisor, before, **variables)

    def settle(self) -> None:
        """Wait until it has read all that programs wrote so far."""
        self.do(lambda supervisor: supervisor.read_programs())

    def do(self, job: Callable[[Supervisor], None]) -> None:
        """Do something between what it serves, in its thread."""
        self._jobs.put(job)
        os.eventfd_write(self._wake, 1)
        assert self._done.acquire(timeout=PATIENCE)

    def _serve(self) -> None:
        try:
            while True:
                self.supervisor.serve(self._wake)
                os.eventfd_read(self._wake)
                if (job := self._jobs.get()) is None:
                    return
                job(self.supervisor)
                self._done.release()
        except BaseException as error:
            self._problem = error
            for program in self._programs:  # nobody serves them any more
                program.process.kill()

    def close(self) -> None:
        """End the thread. Raises what it raised."""
        self._jobs.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        os.close(self._wake)
        if self._problem is not None:
            raise self._problem


@contextmanager
def supervised(
    model: Path, *, records: bool = False, counts: bool = False, **options: Any
) -> Iterator[Supervised]:
    """Have a supervisor for a pack, an index or a shard, with `StreamingOptions`."""
    choices = StreamingOptions(**options)
    failures: list[MoepackError] = []
    with (
        open_model([model]) as pack,
        Supervisor(pack, choices, failures.append, records=records, counts=counts) as supervisor,
    ):
        serving = Supervised(supervisor, failures)
        try:
            yield serving
        finally:
            serving.close()


def image_of(pack_path: Path, path: Path) -> Path:
    """Write a pack as one GGUF, by its layout, with zeros behind tensors."""
    with moepack.open(pack_path) as pack:
        layout = lay_out(pack, mmap.PAGESIZE)
        content = bytearray(layout.length)
        content[: len(layout.header)] = layout.header
        for tensor in (*layout.dense, *layout.experts):
            for extent in tensor.extents:
                data = pack.file_paths[extent.input].read_bytes()
                piece = data[extent.input_offset : extent.input_offset + extent.length]
                content[extent.offset : extent.offset + extent.length] = piece
    path.write_bytes(content)
    return path
