"""How fast a model runs within a limit of memory: from a pack, from its shards, and mapped."""

from __future__ import annotations

import os
import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moepack.bench.control_group import ControlGroup, control_group
from moepack.bench.engine_runs import (
    DEFAULTS,
    LOADINGS,
    PROGRAM_LENGTH,
    EngineRun,
    PhaseRun,
    RunRequest,
    divide_memory,
    run_alone,
    run_moepack,
)
from moepack.bench.measuring import Spread, in_turns, spread
from moepack.common.paths import AnyPath, PathOrPaths
from moepack.common.sizes import Size, parse_size
from moepack.host.memory_limits import read_memory
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.pack import Pack
from moepack.running.programs.command import single_text_options
from moepack.running.serving.model_server import ModelServer
from moepack.running.streaming.supervisor import StreamingOptions
from moepack.source.shards import open_source
from moepack.storage import page_cache

PROMPT_TOKENS = 1000
_SHARE = 0.5
"""The default limit, as a share of the model, beside the memory of programs."""
_SPARE_TOKENS = 64
"""Tokens of a context for the marks that begin and end a text."""
_MAX_TOKEN = 64
"""Characters of text to tokenize for each token of a prompt."""
_LEAST_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class PhaseSpeed:
    """The speed of a phase over all rounds, and its reads in the last one; None if unknown.

    `read_length_per_token` is the bytes of missing experts, or for llama.cpp alone, those that its
    process read from all files.
    """

    tokens_per_second: Spread | None
    hit_rate: float | None
    misses: int | None
    read_length: int | None
    read_length_per_token: float | None
    read_share: float | None


@dataclass(frozen=True, slots=True)
class SideFacts:
    """One way to run the model: until the first token, and after it.

    Speeds are None if the program was killed, out of memory.
    """

    name: str
    first_token_seconds: Spread | None
    prompt: PhaseSpeed
    decode: PhaseSpeed


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """The speed of a model by several programs.

    `is_limited` is false if no limit on memory could be set. Of `memory_limit`, experts get
    `expert_memory` bytes under moepack. `read_limit` is bytes a second, None for the drive's own
    speed. `same_text` is whether all programs gave the same text, except llama.cpp with its
    defaults, which rounds otherwise; None for a single program.
    """

    pack: str
    model_length: int
    memory_limit: int
    is_limited: bool
    expert_memory: int
    read_limit: int | None
    micro_batch: int
    prompt_count: int | None
    token_count: int
    round_count: int
    sides: tuple[SideFacts, ...]
    same_text: bool | None


def bench_run(
    pack: AnyPath,
    *,
    source: PathOrPaths | None = None,
    memory: Size | None = None,
    read_limit: Size | None = None,
    prompt: str | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    tokens: int = 60,
    micro_batch: int | None = None,
    rounds: int = 3,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EngineSpeed:
    """Run the model of a pack in programs of their own, in turns, each within `memory` bytes.

    The page cache counts to the limit, and holds nothing of the model at the start: experts get
    the rest after programs, dense part and context. With `source`, or if `pack` is a GGUF, the
    shards are run as well, by `moepack run` and by llama.cpp's server alone: mapped, read, and with
    its defaults, which may repack weights. All get the same prompt, threads (by default as many as
    llama.cpp takes) and micro-batches (by default up to 2,048 tokens, as memory allows).
    `read_limit` is bytes a second for each program, as on a slower drive. The prompt is the first
    `prompt_tokens` tokens of a text, by default Python's reference; `tokens` follow.

    Raises RequestError for a limit that is too small, MachineError if a program fails or reads
    cannot be limited, and what opening raises.
    """
    named = pack if source is None and named_pack(pack) is None else source
    shards = [] if named is None else [shard.path for shard in open_source(named).shards]
    context = max(_LEAST_CONTEXT, prompt_tokens + tokens + _SPARE_TOKENS)
    with open_model(pack) as opened:
        opened.require_files()
        opened.require_complete()
        shape, files = opened.shape, [*opened.file_paths, *map(Path, shards)]
        model_length = (shape.dense_length or 0) + shape.expert_length
        limit = int(model_length * _SHARE) + PROGRAM_LENGTH
        if memory is not None:
            limit = parse_size(memory, "memory", whole=read_memory())
        division = divide_memory(opened, limit, context, micro_batch)
        text = beginning_of(prompt or reference_text(), prompt_tokens, opened)
    request = RunRequest(text, tokens, context, threads, division)
    programs = _programs(None if named is pack else pack, shards, request)
    advance = progress or (lambda count, total: None)
    if read_limit is not None:
        read_limit = parse_size(read_limit, "read_limit")
    reads = None if read_limit is None else dict.fromkeys(files, read_limit)
    with control_group(limit, reads) as group:

        def measure(name: str) -> EngineRun | None:
            page_cache.drop(files)
            run = programs[name](group)
            advance(1, rounds * len(programs))
            return run

        results = in_turns({name: partial(measure, name) for name in programs}, rounds)
    runs = [run for some in results.values() for run in some if run is not None]
    texts = {run.text for name in results.keys() - {DEFAULTS} for run in results[name] if run}
    return EngineSpeed(
        pack=os.fspath(pack),
        model_length=model_length,
        memory_limit=limit,
        is_limited=group is not None,
        expert_memory=division.experts,
        read_limit=read_limit,
        micro_batch=division.micro_batch,
        prompt_count=runs[0].prompt.token_count if runs else None,
        token_count=tokens,
        round_count=rounds,
        sides=tuple(_facts(name, some) for name, some in results.items()),
        same_text=len(texts) == 1 if texts and len(programs) > 1 else None,
    )


_Program = Callable[[ControlGroup | None], EngineRun | None]


def _programs(
    pack: AnyPath | None, shards: Sequence[str], request: RunRequest
) -> dict[str, _Program]:
    """Return what is run, by name."""
    programs: dict[str, _Program] = {}
    if pack is not None:
        programs["pack"] = partial(run_moepack, [os.fspath(pack)], request)
    if shards:
        programs["shards"] = partial(run_moepack, shards, request)
        programs |= {one: partial(run_alone, shards[0], one, request) for one in LOADINGS}
    return programs


def _facts(name: str, runs: Sequence[EngineRun | None]) -> SideFacts:
    ended = [run for run in runs if run is not None]
    return SideFacts(
        name=name,
        first_token_seconds=_spread([run.first_token_seconds for run in ended]),
        prompt=_speed([run.prompt for run in ended]),
        decode=_speed([run.decode for run in ended]),
    )


def _speed(phases: Sequence[PhaseRun]) -> PhaseSpeed:
    last = phases[-1] if phases else PhaseRun(0, None)
    per_token = None
    if last.read_length is not None and last.token_count:
        per_token = last.read_length / last.token_count
    return PhaseSpeed(
        tokens_per_second=_spread([phase.tokens_per_second for phase in phases]),
        hit_rate=last.hit_rate,
        misses=last.misses,
        read_length=last.read_length,
        read_length_per_token=per_token,
        read_share=last.read_share,
    )


def _spread(values: Sequence[float | None]) -> Spread | None:
    numbers = [value for value in values if value is not None]
    return spread(numbers) if numbers else None


def reference_text() -> str:
    """Return the Python reference of `help()`: 460,000 characters of prose and code.

    Repeated words would flatter whoever reads experts: their tokens are routed to the same ones.
    """
    return "\n\n".join(pydoc_data.topics.topics.values())


def beginning_of(text: str, count: int, pack: Pack) -> str:
    """Return the first `count` tokens of a text by a model's vocabulary, as text.

    Tokens that begin every text come on top. Raises what `ModelServer` and its client raise.
    """
    options = single_text_options(64, 1, 1)
    with ModelServer(pack, StreamingOptions("floor"), options=options) as server:
        tokens = server.client.tokenize(text[: count * _MAX_TOKEN])
        return server.client.detokenize(tokens[:count])
