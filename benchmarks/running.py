"""Running models that are larger than their memory, against llama.cpp that maps them."""

from collections.abc import Iterator
from pathlib import Path

import moepack
from benchmarks.runnable import write_runnable
from benchmarks.table import Row, Spread
from moepack.bench.engine_speed import PROGRAM_LENGTH, EngineSpeed, SideFacts, bench_run

_LAYERS = 8
_TOKENS = 40
_SHARES = (0.25, 0.45)
"""Of the model, what memory holds."""
_LEAST_GAIN = 12
_LEAST_SHARE = 0.95
_ROOM = 1 << 30
"""Beyond the model, where all of it is to fit: for context and page cache."""


def models(folder: Path, rounds: int) -> Iterator[Row]:
    """Run a model whose experts are chosen evenly, and one in which some are chosen more often."""
    for name, skew in (("even", 0.0), ("skewed", 1.0)):
        source = write_runnable(folder / f"{name}.gguf", _LAYERS, skew=skew)
        pack = folder / f"{name}.moepack"
        moepack.pack_model(source, pack)
        length = source.stat().st_size
        for share in _SHARES:
            memory = int(share * length) + PROGRAM_LENGTH
            speed = bench_run(pack, source=source, memory=memory, tokens=_TOKENS, rounds=rounds)
            yield from _rows(f"run, {name}, {share:.0%} of it", speed, _LEAST_GAIN)
        speed = bench_run(
            pack,
            source=source,
            memory=length + _ROOM + PROGRAM_LENGTH,
            tokens=_TOKENS,
            rounds=rounds,
        )
        yield from _rows(f"run, {name}, all of it", speed, _LEAST_SHARE)
        source.unlink()


def _rows(name: str, speed: EngineSpeed, limit: float) -> Iterator[Row]:
    """Compare running a pack with llama.cpp that maps it, and with running the shards."""
    if not speed.is_limited:
        yield Row(name, "no limit can be set")
        return
    pack, shards, mapped = speed.sides
    assert speed.same_text, "they gave different texts"
    yield _row(f"{name}: llama.cpp, mapped", pack, mapped, limit)
    yield _row(f"{name}: its shards", pack, shards, None)


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
