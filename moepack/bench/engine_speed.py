"""How fast a model runs within a limit of memory: from a pack, from its shards, and mapped."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moepack.bench.engine_runs import (
    DEFAULTS,
    LOADINGS,
    EngineRun,
    Request,
    run_alone,
    run_moepack,
)
from moepack.bench.memory_group import MemoryGroup, memory_group
from moepack.bench.run_memory import PROGRAM_LENGTH, RunMemory, divide_memory
from moepack.bench.turns import in_turns
from moepack.paths import AnyPath, PathOrPaths
from moepack.reading.pack import Pack
from moepack.source.shards import open_source
from moepack.storage import page_cache

PROMPT = "Once upon a time there was a small town by the sea, and in that town"
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

    Of the limit the experts of the pack, and of the shards, get `expert_memory` bytes. Prompts are
    computed in batches of `micro_batch` tokens.

    `same_text` says whether all ways gave the same text, but for llama.cpp with its defaults, which
    rounds otherwise; None where there was one alone.
    """

    pack: str
    model_length: int
    memory_limit: int
    is_limited: bool
    expert_memory: int
    micro_batch: int
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

    The page cache counts to the limit, and holds nothing of the model at the start: experts get
    what is left by the programs, the dense part and the context. `pinned` bytes of them are brought
    in at the start, and stay. With `source`, also from the shards as they lie, and by llama.cpp's
    server alone: mapped, read, and with its defaults, which may repack weights. All get the same
    prompt, threads (by default as many as llama.cpp takes) and batches.

    Raises RequestError for a limit that is too small, MachineError where a program fails, and what
    opening raises.
    """
    shards = [] if source is None else [shard.path for shard in open_source(source).shards]
    with Pack(pack) as opened:
        shape, files = opened.shape, [*opened.file_paths, *map(Path, shards)]
        model_length = (shape.dense_length or 0) + shape.expert_length
        limit = int(model_length * _SHARE) + PROGRAM_LENGTH if memory is None else memory
        division = divide_memory(opened, limit, context=context, pinned=pinned)
    request = Request(prompt, tokens, context, threads)
    programs = _Programs(os.fspath(pack), shards, files, request, division, pinned)
    names = programs.names
    advance = progress or (lambda count, total: None)
    with memory_group(limit) as group:

        def measure(name: str) -> EngineRun | None:
            run = programs.measure(name, group)
            advance(1, rounds * len(names))
            return run

        results = in_turns({name: partial(measure, name) for name in names}, rounds)
    exact = [runs for name, runs in results.items() if name != DEFAULTS]
    texts = {run.text for runs in exact for run in runs if run is not None}
    return EngineSpeed(
        pack=os.fspath(pack),
        model_length=model_length,
        memory_limit=limit,
        is_limited=group is not None,
        expert_memory=division.experts,
        micro_batch=division.micro_batch,
        token_count=tokens,
        round_count=rounds,
        sides=tuple(_facts(name, runs) for name, runs in results.items()),
        same_text=len(texts) == 1 if texts and len(names) > 1 else None,
    )


@dataclass(frozen=True, slots=True)
class _Programs:
    """The programs that are measured: one for each way to run the model that is in `files`."""

    pack: str
    shards: Sequence[str]
    files: Sequence[Path]
    request: Request
    memory: RunMemory
    pinned: int

    @property
    def names(self) -> Sequence[str]:
        """What they are called, ours first."""
        return (_PACK, _SHARDS, *LOADINGS) if self.shards else (_PACK,)

    def measure(self, name: str, group: MemoryGroup | None) -> EngineRun | None:
        """Run one of them, while none of the model is cached; None where it was killed."""
        page_cache.drop(self.files)
        if name in LOADINGS:
            batch = self.memory.micro_batch
            return run_alone(self.shards[0], name, self.request, batch, group)
        paths = [self.pack] if name == _PACK else self.shards
        return run_moepack(paths, self.request, self.memory, self.pinned, group)


def _facts(name: str, runs: Sequence[EngineRun | None]) -> SideFacts:
    ended = [run for run in runs if run is not None]
    speeds = [run.tokens_per_second for run in ended if run.tokens_per_second is not None]
    last = ended[-1] if ended else EngineRun("", None)
    return SideFacts(
        name=name,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        tokens_per_second_lowest=min(speeds, default=None),
        tokens_per_second_highest=max(speeds, default=None),
        hit_rate=last.hit_rate,
        read_length_per_token=last.read_length_per_token,
        read_share=last.read_share,
    )
