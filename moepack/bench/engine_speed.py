"""How fast a model runs within a limit of memory: from a pack, from its shards, and mapped."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moepack.bench import stock_run
from moepack.bench.memory_group import MemoryGroup, memory_group
from moepack.bench.turns import in_turns
from moepack.errors import MachineError, RequestError
from moepack.llama_cpp.library import cpu_count
from moepack.paths import AnyPath, PathOrPaths
from moepack.reading.pack import Pack
from moepack.sizes import size_text
from moepack.source.shards import open_source
from moepack.storage import page_cache

PROMPT = "Once upon a time there was a small town by the sea, and in that town"
PROGRAM_LENGTH = 160 << 20
"""Bytes that a program takes beside the model: Python and llama.cpp."""
_MOST_IN_BATCH = 512
_SHARE = 0.5
"""Of the model, what a limit is where none is given."""
_PACK, _SHARDS = "pack", "shards"


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What one way to run the model did, by rounds; the median, and the means of the last round.

    `tokens_per_second` is None where the program was killed, out of memory.
    """

    name: str
    tokens_per_second: float | None
    tokens_per_second_lowest: float | None
    tokens_per_second_highest: float | None
    hit_rate: float | None
    read_length_per_token: float | None
    read_share: float | None


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """How fast a model runs. `is_limited` says whether there was a limit on memory at all.

    `same_text` says whether all ways gave the same text, but for llama.cpp with its defaults, which
    rounds otherwise; None where there was one alone.
    """

    pack: str
    model_length: int
    memory_limit: int
    is_limited: bool
    token_count: int
    round_count: int
    sides: tuple[SideFacts, ...]
    same_text: bool | None


def bench_run(
    pack: AnyPath,
    *,
    source: PathOrPaths | None = None,
    memory: int | None = None,
    pinned: int = 0,
    tokens: int = 60,
    rounds: int = 3,
    context: int = 1024,
    threads: int | None = None,
    prompt: str = PROMPT,
    progress: Callable[[int, int], None] | None = None,
) -> EngineSpeed:
    """Run the model of a pack in programs of their own, in turns, each within `memory` bytes.

    Of its experts `pinned` bytes are brought in at the start, and stay. With `source`, also from
    the shards as they lie, and under llama.cpp alone: mapped, read, and with its defaults, which
    may repack weights. The page cache counts to the limit, and holds nothing of the model at the
    start. Raises RequestError for a limit that is too small, MachineError where a program fails,
    and what opening raises.
    """
    shards = [] if source is None else [shard.path for shard in open_source(source).shards]
    with Pack(pack) as opened:
        shape, files = opened.shape, [*opened.file_paths, *map(Path, shards)]
    model_length = (shape.dense_length or 0) + shape.expert_length
    limit = int(model_length * _SHARE) + PROGRAM_LENGTH if memory is None else memory
    _check_limit(limit)
    threads = cpu_count() if threads is None else threads
    room = limit - PROGRAM_LENGTH
    programs = _Programs(
        *(os.fspath(pack), shards, files, prompt, tokens, context, threads, room, pinned)
    )
    names = programs.names
    advance = progress or (lambda count, total: None)
    with memory_group(limit) as group:

        def measure(name: str) -> dict[str, Any]:
            facts = programs.measure(name, group)
            advance(1, rounds * len(names))
            return facts

        results = in_turns({name: partial(measure, name) for name in names}, rounds)
    exact = [runs for name, runs in results.items() if name != stock_run.DEFAULTS]
    texts = {run["text"] for runs in exact for run in runs if "text" in run}
    return EngineSpeed(
        pack=os.fspath(pack),
        model_length=model_length,
        memory_limit=limit,
        is_limited=group is not None,
        token_count=tokens,
        round_count=rounds,
        sides=tuple(_facts(name, runs) for name, runs in results.items()),
        same_text=len(texts) == 1 if len(names) > 1 else None,
    )


def _check_limit(limit: int) -> None:
    if limit <= PROGRAM_LENGTH:
        expected = f"more than {size_text(PROGRAM_LENGTH)}, which the program takes itself"
        raise RequestError("too little memory", expected=expected, found=size_text(limit))


@dataclass(slots=True)
class _Programs:
    """The programs that are measured: one for each way to run the model that is in `files`."""

    pack: str
    shards: Sequence[str]
    files: Sequence[Path]
    prompt: str
    tokens: int
    context: int
    threads: int
    memory: int
    pinned: int
    batch_count: int = _MOST_IN_BATCH
    """Of prompts, in the last of ours: others would round otherwise."""

    @property
    def names(self) -> Sequence[str]:
        """What they are called, ours first."""
        return (_PACK, _SHARDS, *stock_run.LOADINGS) if self.shards else (_PACK,)

    def measure(self, name: str, group: MemoryGroup | None) -> dict[str, Any]:
        """Run one of them, while none of the model is cached; see `_run`."""
        page_cache.drop(self.files)
        facts = _run(self._command(name), group)
        self.batch_count = facts.get("batch_count", self.batch_count)
        return facts

    def _command(self, name: str) -> list[str]:
        if name not in stock_run.LOADINGS:
            return self._ours([self.pack] if name == _PACK else self.shards)
        numbers = map(str, (self.tokens, self.context, self.threads, self.batch_count))
        stock = [sys.executable, "-m", "moepack.bench.stock_run", name]
        return [*stock, self.shards[0], self.prompt, *numbers]

    def _ours(self, paths: Sequence[str]) -> list[str]:
        options = {
            "--prompt": self.prompt,
            "--tokens": self.tokens,
            "--context": self.context,
            "--threads": self.threads,
            "--memory": self.memory,
            "--pin": self.pinned,
            "--temperature": 0,
        }
        words = [str(word) for pair in options.items() for word in pair]
        return [sys.executable, "-m", "moepack", "run", "--raw", "--json", *words, *paths]


def _run(command: list[str], group: MemoryGroup | None) -> dict[str, Any]:
    """Run a program; nothing where it was killed."""
    words = command if group is None else group.command(command)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, text=True, stdout=pipe, stderr=pipe) as process:
        printed, complaint = process.communicate()
    if process.returncode in (-9, 137):
        return {}
    if process.returncode:
        problem = "a program that was to be measured failed"
        raise MachineError(problem, found=complaint.strip() or f"exit code {process.returncode}")
    facts: dict[str, Any] = json.loads(printed)
    return facts


def _facts(name: str, runs: list[dict[str, Any]]) -> SideFacts:
    speeds = [run["tokens_per_second"] for run in runs if run.get("tokens_per_second")]
    whole: list[dict[str, Any]] = [run for run in runs if run.get("step_count")]
    last = whole[-1] if whole else {}
    steps, seconds = last.get("step_count"), last.get("seconds")
    return SideFacts(
        name=name,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        tokens_per_second_lowest=min(speeds, default=None),
        tokens_per_second_highest=max(speeds, default=None),
        hit_rate=last.get("hit_rate"),
        read_length_per_token=last["read_length"] / steps if steps else None,
        read_share=last["read_seconds"] / seconds if seconds else None,
    )
