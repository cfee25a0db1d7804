"""One run of a model by a program of its own: `moepack run`, or llama.cpp's server alone.

All are asked the same by the same server, which says how long its tokens took. Threads wait for
each other as users get it: under `moepack run` those of OpenMP sleep soon (OMP_WAIT_POLICY and
GOMP_SPINCOUNT), alone they spin for milliseconds, unless a variable says otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from moepack.bench.memory_group import MemoryGroup, kill_count
from moepack.bench.run_memory import RunMemory
from moepack.errors import MachineError
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


class EngineRun(NamedTuple):
    """What a run made, and how fast; None is what is not known, as of llama.cpp alone."""

    text: str
    tokens_per_second: float | None
    hit_rate: float | None = None
    read_length_per_token: float | None = None
    read_share: float | None = None


def run_moepack(
    paths: Sequence[str],
    request: Request,
    memory: RunMemory,
    pinned: int,
    group: MemoryGroup | None,
) -> EngineRun | None:
    """Run a pack or shards by `moepack run`, with `pinned` bytes of experts brought in before.

    None where it was killed for want of memory. Raises MachineError with its words where it fails.
    """
    options = {
        "--prompt": request.prompt,
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
    command = [sys.executable, "-m", "moepack", "run", *flags, *words, *paths]

    def run() -> EngineRun:
        return _of_facts(json.loads(_output([*_prefix(group), *command])))

    return _unless_killed(run, group)


def run_alone(
    path: str, loading: str, request: Request, micro_batch: int, group: MemoryGroup | None
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
            for _ in answer:
                pass
            return EngineRun(answer.text, answer.facts.tokens_per_second)

    return _unless_killed(run, group)


def _prefix(group: MemoryGroup | None) -> list[str]:
    return [] if group is None else group.command([])


def _unless_killed(run: Callable[[], EngineRun], group: MemoryGroup | None) -> EngineRun | None:
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
    """Take what `moepack run --json` prints of the tokens after the first."""
    steps, seconds = facts["step_count"], facts["seconds"]
    return EngineRun(
        facts["text"],
        facts["tokens_per_second"],
        facts["hit_rate"],
        facts["read_length"] / steps if steps else None,
        facts["read_seconds"] / seconds if seconds else None,
    )
