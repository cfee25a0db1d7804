"""One run of a model by a program of its own: `moepack run`, or llama.cpp's server alone.

All get the same request by the same server, which reports how long its tokens took; the first token
is timed at the client. Each server is new, so that no prompt is cached. Threads wait for each other
as users get it: under `moepack run` those of OpenMP sleep soon (OMP_WAIT_POLICY and
GOMP_SPINCOUNT), alone they spin for milliseconds, unless a variable says otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from moepack.bench.control_group import ControlGroup
from moepack.common.errors import MachineError, RequestError
from moepack.common.sizes import size_text
from moepack.host.control_groups import read_number
from moepack.host.memory_limits import kill_count
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.context import MOEPACK_RUN
from moepack.planning.footprint.model import footprint_of
from moepack.running.programs.command import single_text_options
from moepack.running.serving.client import Answer, AnswerFacts, PhaseFacts
from moepack.running.serving.model_server import ServerProcess
from moepack.running.serving.sampling import Sampling
from moepack.running.serving.server_memory import floor_length, micro_batches
from moepack.running.streaming.supervisor import dense_length

MAPPED = "llama.cpp, mapped"
READ = "llama.cpp, read"
DEFAULTS = "llama.cpp, defaults"
LOADINGS = MappingProxyType(
    {
        MAPPED: ("--load-mode", "mmap", "--no-repack"),
        READ: ("--load-mode", "none", "--no-repack"),
        DEFAULTS: ("--load-mode", "auto", "--repack", "--warmup", "--fit", "on"),
    }
)
"""Options by which llama.cpp loads a model; the last are llama-server's defaults, not our server's.

With them it repacks weights if it has a faster layout for the processor. The copy has to fit
into memory, and the last bits of its logits differ.
"""

_GREEDY = Sampling(temperature=0)

PROGRAM_LENGTH = 256 << 20
"""Bytes that `moepack run` takes beside the model and its context: two processes of Python, each
30 to 45 MiB, llama.cpp's code, up to 128 MiB of read buffers, and page tables."""


class RunMemory(NamedTuple):
    """The bytes for experts, and the tokens of a prompt computed at once."""

    experts: int
    micro_batch: int


class RunRequest(NamedTuple):
    """A prompt to continue by `token_count` tokens, with the server's context and threads.

    `context` is tokens; None for `threads` is llama.cpp's default.
    """

    prompt: str
    token_count: int
    context: int
    threads: int | None
    memory: RunMemory


class PhaseRun(NamedTuple):
    """Speed and reads of a phase; None if unknown.

    `token_count` is tokens that were computed, `read_length` the bytes of the missing experts, or
    for llama.cpp alone, the bytes that its process read from all files.
    """

    token_count: int
    tokens_per_second: float | None
    read_length: int | None = None
    misses: int | None = None
    hit_rate: float | None = None
    read_share: float | None = None


class EngineRun(NamedTuple):
    """The text of a run, and its phases: the prompt, and the tokens after the first."""

    text: str
    first_token_seconds: float | None
    prompt: PhaseRun
    decode: PhaseRun


def divide_memory(
    pack: Pack, limit: int, context: int, micro_batch: int | None = None
) -> RunMemory:
    """Divide a `limit` on all bytes that `moepack run` takes.

    Dense tensors count, which lie in the page cache, and `context` tokens; tables that are looked
    up by row do not. Without a `micro_batch` the longest that fits is chosen. Raises RequestError
    if the experts of one micro-batch do not fit, and what reading metadata raises.
    """
    dense = dense_length(pack)
    footprint = footprint_of(pack)
    counts = micro_batches(footprint, context, limit) if micro_batch is None else (micro_batch,)
    for count in counts:
        options = MOEPACK_RUN._replace(token_count=context, batch_count=count)
        cells = footprint.context(options)
        computing = (cells.length if cells else 0) + (footprint.compute_length(options) or 0)
        experts = limit - PROGRAM_LENGTH - dense - computing
        least = floor_length(pack, count, 0)
        if experts >= least:
            return RunMemory(experts, count)
    raise RequestError(
        "too little memory to run the model",
        expected=f"{size_text(PROGRAM_LENGTH + dense + computing + least)} "
        f"({size_text(PROGRAM_LENGTH)} the programs, {size_text(dense)} dense, "
        f"{size_text(computing)} the context, {size_text(least)} experts)",
        found=size_text(limit),
    )


def run_moepack(
    paths: Sequence[str], request: RunRequest, group: ControlGroup | None
) -> EngineRun | None:
    """Run a pack or shards by `moepack run`.

    Returns None if it was killed, out of memory. Raises MachineError with its message if it fails.
    """
    options = {
        "--tokens": request.token_count,
        "--context": request.context,
        "--micro-batch": request.memory.micro_batch,
        "--memory": request.memory.experts,
        "--temperature": 0,
    }
    if request.threads is not None:
        options["--threads"] = request.threads
    words = [str(word) for pair in options.items() for word in pair]
    flags = ("--raw", "--json", "--no-learn")  # each run begins alike
    command = [sys.executable, "-m", "moepack", "run", *flags, *words]

    def run(prefix: list[str]) -> EngineRun:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:  # no argument is as long
            file.write(request.prompt)
            file.flush()
            words = [*prefix, *command, "--file", file.name, *paths]
            done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            message = done.stderr.strip() or f"exit code {done.returncode}"
            raise MachineError("a measured program failed", found=message)
        return _run_of(json.loads(done.stdout))

    return _unless_killed(run, group)


def run_alone(
    path: str, loading: str, request: RunRequest, group: ControlGroup | None
) -> EngineRun | None:
    """Run a GGUF by llama.cpp's server without moepack, loaded as LOADINGS says.

    Returns None if it was killed, out of memory. Raises what `ServerProcess` and its client raise.
    """
    sizes = single_text_options(request.context, request.threads, request.memory.micro_batch)
    options = [*LOADINGS[loading], *sizes]

    def run(prefix: list[str]) -> EngineRun:
        with (
            ServerProcess(path, options=options, prefix=prefix) as server,
            server.client.complete(
                request.prompt, count=request.token_count, sampling=_GREEDY
            ) as answer,
        ):
            return _read_answer(answer, server.process_id)

    return _unless_killed(run, group)


def _read_answer(answer: Answer, process_id: int) -> EngineRun:
    """Read an answer to its end, and count the bytes that the server reads meanwhile."""
    before = _read_length(process_id)
    first: list[int | None] = []

    def note(facts: AnswerFacts) -> None:
        if facts.token_count and not first:
            first.append(_read_length(process_id))

    answer.on_event = note
    for _ in answer:
        pass
    at_first, at_end = first[0] if first else None, _read_length(process_id)
    facts = answer.facts
    assert not facts.kept_count, "a new server has no prompt cached"
    return EngineRun(
        answer.text,
        facts.first_token_seconds,
        _phase(facts.prompt, before, at_first),
        _phase(facts, at_first, at_end),
    )


def _read_length(process_id: int) -> int | None:
    """Return the bytes that a process has read from drives, mapped files included.

    None if the system does not report it (proc_pid_io(5)).
    """
    return read_number(Path(f"/proc/{process_id}/io"), "read_bytes:")


def _phase(phase: PhaseFacts, before: int | None, after: int | None) -> PhaseRun:
    length = None if before is None or after is None else after - before
    return PhaseRun(phase.step_count, phase.tokens_per_second, length)


def _unless_killed(
    run: Callable[[list[str]], EngineRun], group: ControlGroup | None
) -> EngineRun | None:
    """Call `run` with the beginning of its command; return None if a process was killed."""
    folders, prefix = (None, []) if group is None else (group.folders, group.command([]))
    count = kill_count(folders)
    try:
        return run(prefix)
    except MachineError:
        if kill_count(folders) == count:
            raise
        return None


def _run_of(facts: dict[str, Any]) -> EngineRun:
    """Read the JSON of `moepack run --json`."""
    assert not facts["kept_count"], "a new server has no prompt cached"
    prompt, decode = (
        PhaseRun(
            phase["step_count"],
            phase["tokens_per_second"],
            phase["read_length"],
            phase["misses"],
            phase["hit_rate"],
            min(1.0, phase["read_seconds"] / phase["seconds"]) if phase["seconds"] else None,
        )
        for phase in (facts["prompt"], facts)
    )
    return EngineRun(facts["text"], facts["first_token_seconds"], prompt, decode)
