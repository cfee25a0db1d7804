"""One run of a model by a program of its own: `moepack run`, or llama.cpp's server alone.

All are asked the same by the same server, which says how long its tokens took; the first token is
timed where it arrives. Each server is new, so that nothing of the prompt is there before. Threads
wait for each other as users get it: under `moepack run` those of OpenMP sleep soon (OMP_WAIT_POLICY
and GOMP_SPINCOUNT), alone they spin for milliseconds, unless a variable says otherwise.
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

from moepack.bench.control_group import ControlGroup, kill_count
from moepack.bench.run_memory import RunMemory
from moepack.errors import MachineError
from moepack.programs.answer import Answer, AnswerFacts, PhaseFacts
from moepack.programs.command import single_text_options
from moepack.programs.sampling import Sampling
from moepack.programs.server_process import ServerProcess

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
"""How llama.cpp loads a model; the last are llama-server's own defaults, which ours has changed.

With them it repacks weights, where it has a faster layout for the processor. The copy has to fit
into memory, and the last bits of its logits are others.
"""

_GREEDY = Sampling(temperature=0)


class Request(NamedTuple):
    """A prompt to go on with by `token_count` tokens, and what the server is to have for it.

    `context` is tokens; with None for `threads` it takes as many as llama.cpp does by default.
    """

    prompt: str
    token_count: int
    context: int
    threads: int | None


class PhaseRun(NamedTuple):
    """How fast a phase was, and what it read; None is what is not known.

    `token_count` is tokens that were computed, `read_length` the bytes that experts missing in
    memory have, of llama.cpp alone what its process read of all files.
    """

    token_count: int
    tokens_per_second: float | None
    read_length: int | None = None
    misses: int | None = None
    hit_rate: float | None = None
    read_share: float | None = None


class EngineRun(NamedTuple):
    """What a run made: a prompt, and the tokens after the first."""

    text: str
    first_token_seconds: float | None
    prompt: PhaseRun
    decode: PhaseRun


def run_moepack(
    paths: Sequence[str],
    request: Request,
    memory: RunMemory,
    pinned: int,
    group: ControlGroup | None,
) -> EngineRun | None:
    """Run a pack or shards by `moepack run`, with `pinned` bytes of experts brought in before.

    None where it was killed for want of memory. Raises MachineError with its words where it fails.
    """
    options = {
        "--tokens": request.token_count,
        "--context": request.context,
        "--micro-batch": memory.micro_batch,
        "--memory": memory.experts,
        "--pin": pinned,
        "--temperature": 0,
    }
    if request.threads is not None:
        options["--threads"] = request.threads
    words = [str(word) for pair in options.items() for word in pair]
    flags = ("--raw", "--json", "--no-learn")  # each run begins alike
    command = [sys.executable, "-m", "moepack", "run", *flags, *words]

    def run() -> EngineRun:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:  # no argument is as long
            file.write(request.prompt)
            file.flush()
            words = [*command, "--file", file.name, *paths]
            return _of_facts(json.loads(_output([*_prefix(group), *words])))

    return _unless_killed(run, group)


def run_alone(
    path: str, loading: str, request: Request, micro_batch: int, group: ControlGroup | None
) -> EngineRun | None:
    """Run a GGUF by llama.cpp's server without a pager, loaded as LOADINGS says.

    None where it was killed for want of memory. Raises what `ServerProcess` and its client raise.
    """
    sizes = single_text_options(request.context, request.threads, micro_batch)

    def run() -> EngineRun:
        options = [*LOADINGS[loading], *sizes]
        with (
            ServerProcess(path, options=options, prefix=_prefix(group)) as server,
            server.client.complete(
                request.prompt, count=request.token_count, sampling=_GREEDY
            ) as answer,
        ):
            return _read_answer(answer, server.process_id)

    return _unless_killed(run, group)


def _read_answer(answer: Answer, process_id: int) -> EngineRun:
    """Read an answer to its end, and how much the server reads for it."""
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
    _check_computed(facts.kept_count)
    return EngineRun(
        answer.text,
        facts.first_token_seconds,
        _phase(facts.prompt, before, at_first),
        _phase(facts, at_first, at_end),
    )


def _check_computed(kept_count: int) -> None:
    """Make sure that no prompt was there from before, as a new server has none."""
    assert not kept_count


def _phase(phase: PhaseFacts, before: int | None, after: int | None) -> PhaseRun:
    length = None if before is None or after is None else after - before
    return PhaseRun(phase.step_count, phase.tokens_per_second, length)


def _read_length(process_id: int) -> int | None:
    """Return the bytes that a process has had read from drives (proc_pid_io(5)).

    Pages of mapped files count as well. None where the system does not tell.
    """
    try:
        lines = Path(f"/proc/{process_id}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def _prefix(group: ControlGroup | None) -> list[str]:
    return [] if group is None else group.command([])


def _unless_killed(run: Callable[[], EngineRun], group: ControlGroup | None) -> EngineRun | None:
    """Run something; None where it failed since the system killed a process for want of memory."""
    count = kill_count(group)
    try:
        return run()
    except MachineError:
        if kill_count(group) == count:
            raise
        return None


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        problem = "a program that was to be measured failed"
        found = done.stderr.strip() or f"exit code {done.returncode}"
        raise MachineError(problem, found=found)
    return done.stdout


def _of_facts(facts: dict[str, Any]) -> EngineRun:
    """Take what `moepack run --json` prints."""
    _check_computed(facts["kept_count"])
    prompt, decode = (_of_phase(phase) for phase in (facts["prompt"], facts))
    return EngineRun(facts["text"], facts["first_token_seconds"], prompt, decode)


def _of_phase(phase: dict[str, Any]) -> PhaseRun:
    seconds = phase["seconds"]
    return PhaseRun(
        phase["step_count"],
        phase["tokens_per_second"],
        phase["read_length"],
        phase["misses"],
        phase["hit_rate"],
        min(1.0, phase["read_seconds"] / seconds) if seconds else None,
    )
