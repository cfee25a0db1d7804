"""Running models that are larger than their memory, against llama.cpp alone and the drive."""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import moepack
from benchmarks import fio
from benchmarks.measure import MOEPACK, Side, against, ratio_row
from benchmarks.runnable import STEADY, write_runnable
from benchmarks.table import Row, Spread, spread
from moepack.bench.engine_speed import PROGRAM_LENGTH, PROMPT, EngineSpeed, SideFacts, bench_run
from moepack.bench.stock_run import DEFAULTS, MAPPED, READ
from moepack.bench.turns import in_turns
from moepack.llama_cpp.sampling import Sampling
from moepack.running.generation import GenerationFacts
from moepack.running.prefetch import Prefetching
from moepack.storage import page_cache

_LAYERS = 8
_TOKENS = 40
_SHARES = (0.25, 0.45)
"""Of the model, what memory holds."""
_SHARES_AHEAD = (0.45, 0.75)
_GREEDY = Sampling(temperature=0)
_LEAST_GAIN = 12
_LEAST_SHARE = 0.95
_MOST_READING = 1.2
_DEPTHS = (1, 2, 4)
"""Of fio's reads, each an expert: about as many as a layer of a token misses."""
_ROOM = 1 << 30
"""Beyond the model, where all of it is to fit: for context and page cache."""


_MODELS: Mapping[str, Mapping[str, float]] = {
    "even": {},
    "skewed": {"skew": 1.0},
    "steady": {"skew": 0.5, "steadiness": STEADY},
}
"""Routers that choose all experts alike, some more often, and what the layer before lets guess."""


def models(folder: Path, rounds: int) -> Iterator[Row]:
    """Run models with random weights of several kinds."""
    for name, options in _MODELS.items():
        source = write_runnable(folder / f"{name}.gguf", _LAYERS, **options)
        pack = folder / f"{name}.moepack"
        moepack.pack_model(source, pack)
        length = source.stat().st_size
        for share in _SHARES:
            memory = int(share * length) + PROGRAM_LENGTH
            speed = bench_run(pack, source=source, memory=memory, tokens=_TOKENS, rounds=rounds)
            yield from _rows(f"run, {name}, {share:.0%} of it", speed, {MAPPED: _LEAST_GAIN})
        speed = bench_run(
            pack,
            source=source,
            memory=length + _ROOM + PROGRAM_LENGTH,
            pinned=length,
            tokens=_TOKENS,
            rounds=rounds,
        )
        peers = {READ: _LEAST_SHARE, MAPPED: _LEAST_SHARE, DEFAULTS: None}
        yield from _rows(f"run, {name}, all of it", speed, peers)
        source.unlink()
        for share in _SHARES_AHEAD:
            memory = int(share * length)
            yield _reading_ahead(f"run, {name}, {share:.0%} of it", pack, memory, rounds)
        if not options:
            yield _reading(f"run, {name}, 45% of it", pack, int(0.45 * length), rounds)
            yield _starting(pack, rounds)


def _reading(name: str, pack: Path, memory: int, rounds: int) -> Row:
    """Compare what tokens waited for experts with fio that reads as much, in turns."""
    if not fio.is_installed():
        return Row(f"{name}, reading: fio", "fio is not installed")
    with moepack.open(pack) as opened:
        file = max(opened.file_paths, key=lambda path: path.stat().st_size)
        length = opened.locate(opened.layers[0], 0).length

    def run() -> float:
        facts = _generate(pack, memory, "off")
        return facts.read_length / facts.read_seconds

    def drive() -> float:
        limits = "--time_based", "--runtime=1"
        return max(fio.random_reads(file, length, depth, *limits).throughput for depth in _DEPTHS)

    speeds = in_turns({"run": run, "fio": drive}, rounds)
    ours, theirs = (f"{median(found) / 1e9:.2f} GB/s" for found in speeds.values())
    ratios = [theirs / ours for ours, theirs in zip(*speeds.values(), strict=True)]
    return Row(f"{name}, reading: fio", ours, theirs, spread(ratios), limit=_MOST_READING)


def _starting(pack: Path, rounds: int) -> Row:
    """Compare a program up to its first token with one that reads the dense part alone."""
    dense = pack / "dense.bin"
    run = ["run", "--raw", "--prompt", "a", "--tokens", "1", "--context", "64", "--memory", "floor"]
    read = [sys.executable, "-c", "import sys; open(sys.argv[1], 'rb').read()", str(dense)]
    forget = partial(page_cache.drop, [path for path in pack.iterdir() if path.is_file()])
    runs = against(Side([*MOEPACK, *run, str(pack)], forget), Side(read, forget), rounds)
    return ratio_row("run, one token: its dense part", *runs, dense.stat().st_size, None)


def _reading_ahead(name: str, pack: Path, memory: int, rounds: int) -> Row:
    """Compare a pack's tokens with and without prefetching, in turns."""
    measure = partial(_generate, pack, memory)
    facts = in_turns({"on": partial(measure, "on"), "off": partial(measure, "off")}, rounds)
    speeds = [[run.tokens_per_second or 0.0 for run in runs] for runs in facts.values()]
    last = facts["on"][-1]
    return Row(
        f"{name}: reading ahead",
        f"{median(speeds[0]):.3g} tok/s, {last.prefetched / max(1, last.misses):.0%} of misses",
        f"{median(speeds[1]):.3g} tok/s",
        spread([on / off for on, off in zip(*speeds, strict=True)]),
        higher_is_better=True,
    )


def _generate(pack: Path, memory: int, prefetch: Prefetching) -> GenerationFacts:
    with moepack.Model(pack, memory=memory, prefetch=prefetch, context=1024) as model:
        generation = model.generate(PROMPT, count=_TOKENS, sampling=_GREEDY)
        for _ in generation:
            pass
        return generation.facts


def _rows(name: str, speed: EngineSpeed, peers: Mapping[str, float | None]) -> Iterator[Row]:
    """Compare running a pack with llama.cpp alone, in the ways of `peers`, and with the shards."""
    if not speed.is_limited:
        yield Row(name, "no limit can be set")
        return
    sides = {side.name: side for side in speed.sides}
    assert speed.same_text, "they gave different texts"
    for peer, limit in {**peers, "shards": None}.items():
        yield _row(f"{name}: {peer}", sides["pack"], sides[peer], limit)


def _row(name: str, ours: SideFacts, theirs: SideFacts, limit: float | None) -> Row:
    value = None
    if ours.tokens_per_second is not None and theirs.tokens_per_second is not None:
        assert ours.tokens_per_second_lowest is not None
        assert ours.tokens_per_second_highest is not None
        assert theirs.tokens_per_second_lowest is not None
        assert theirs.tokens_per_second_highest is not None
        value = Spread(
            ours.tokens_per_second / theirs.tokens_per_second,
            ours.tokens_per_second_lowest / theirs.tokens_per_second_highest,
            ours.tokens_per_second_highest / theirs.tokens_per_second_lowest,
        )
    return Row(name, _text(ours), _text(theirs), value, limit=limit, higher_is_better=True)


def _text(side: SideFacts) -> str:
    if side.tokens_per_second is None:
        return "killed"
    hits = "" if side.hit_rate is None else f", {side.hit_rate:.0%} hits"
    return f"{side.tokens_per_second:.3g} tok/s{hits}"
