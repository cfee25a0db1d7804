"""Running a model that is larger than its memory, against llama.cpp alone and the drive."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import moepack
from benchmarks import fio, resuming
from benchmarks.measure import MOEPACK, Side, against, limit_row
from benchmarks.runnable import Dimensions, write_runnable
from benchmarks.table import Row
from moepack.bench.engine_runs import DEFAULTS, MAPPED, PROGRAM_LENGTH, READ
from moepack.bench.engine_speed import EngineSpeed, SideFacts, bench_run
from moepack.bench.measuring import Spread, in_turns, spread
from moepack.common.sizes import size_text
from moepack.running.serving.run_facts import RunFacts, measure
from moepack.running.serving.sampling import Sampling

_LAYERS = 8
_TOKENS = 40
_SHARES = (0.25, 0.45)
"""Of the model, what memory holds."""
_PROMPT = "Once upon a time there was a small town by the sea, and in that town"
_GREEDY = Sampling(temperature=0)
_LEAST_GAIN = 15
_LEAST_SHARE = 0.98
_MOST_READING = 1.15
_MOST_START = 0.5
_ROOM = 1 << 30
"""Beyond the model, where all of it is to fit: for context and page cache."""
_MEMORY = 620 << 20
"""For experts, where those that are missing are read from the drive."""
_OPTIONS = ("-c", "1024", "-np", "1", "--cache-ram", "0")
_LISTENING = "listening on "


def model(folder: Path, rounds: int) -> Iterator[Row]:
    """Run a model with random weights, whose routers select all experts alike."""
    source = write_runnable(folder / "even.gguf", Dimensions(_LAYERS))
    pack = folder / "even.moepack"
    moepack.pack_model(source, pack)
    length = source.stat().st_size
    for share in _SHARES:
        memory = int(share * length) + PROGRAM_LENGTH
        speed = bench_run(pack, source=source, memory=memory, tokens=_TOKENS, rounds=rounds)
        yield from _rows(f"run, even, {share:.0%} of it", speed, {MAPPED: _LEAST_GAIN})
    speed = bench_run(
        pack,
        source=source,
        memory=length + _ROOM + PROGRAM_LENGTH,
        pinned=length,
        tokens=_TOKENS,
        rounds=rounds,
    )
    peers = {READ: _LEAST_SHARE, MAPPED: _LEAST_SHARE, DEFAULTS: None}
    yield from _rows("run, even, all of it", speed, peers)
    yield _reading(pack, rounds)
    yield from resuming.rows("even", pack, rounds)
    yield _starting_a_program(pack, rounds)
    yield _starting_the_server(pack, source, rounds)
    source.unlink()


def _reading(pack: Path, rounds: int) -> Row:
    """Compare how long tokens waited for experts with fio that reads as much, in turns.

    It reads as many experts at a time as a layer of a token misses.
    """
    name = "run, even, reading: fio"
    if not fio.is_installed():
        return Row(name, "fio is not installed")
    with moepack.open(pack) as opened:
        file = max(opened.file_paths, key=lambda path: path.stat().st_size)
        length = opened.locate(opened.layers[0], 0).length
    depth = math.ceil(_generate(pack).misses / (_TOKENS - 1) / _LAYERS)

    def run() -> float:
        facts = _generate(pack)
        return facts.read_length / facts.read_seconds

    def drive() -> float:
        return fio.random_reads(file, length, depth, "--time_based", "--runtime=2").bytes_per_second

    speeds = in_turns({"run": run, "fio": drive}, rounds)
    ours, theirs = (f"{median(found) / 1e9:.2f} GB/s" for found in speeds.values())
    ratios = [theirs / ours for ours, theirs in zip(*speeds.values(), strict=True)]
    return Row(name, ours, f"{theirs}, {depth} at a time", spread(ratios), limit=_MOST_READING)


def _generate(pack: Path) -> RunFacts:
    with moepack.serve(pack, memory=_MEMORY, learn=False, options=_OPTIONS) as server:
        ask = partial(server.client.complete, _PROMPT, count=_TOKENS, sampling=_GREEDY)
        with measure(server, ask) as answer:
            for _ in answer:
                pass
            return answer.facts


def _starting_a_program(pack: Path, rounds: int) -> Row:
    """Measure what is added to the start and the end of a program that does nothing."""
    command = [*MOEPACK, "run", "--quiet", str(pack), "--", "true"]
    runs = against(Side(command), Side(["true"]), rounds)
    added = [ours.seconds - theirs.seconds for ours, theirs in zip(*runs, strict=True)]
    return limit_row("run -- true: beyond true", added, "s", _MOST_START)


def _starting_the_server(pack: Path, source: Path, rounds: int) -> Row:
    """Measure what is added until the server listens; what it reads is cached on both sides."""
    common = ["--port", "0", "-c", "1024"]
    alone = [sys.executable, "-m", "moepack.running.serving.server", "-m", str(source), *common]
    sides = {
        "ours": partial(_seconds_to_listen, [*MOEPACK, "serve", "--quiet", str(pack), *common]),
        "alone": partial(_seconds_to_listen, alone),
    }
    for side in sides.values():
        side()
    seconds = in_turns(sides, rounds)
    added = [ours - theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    return limit_row("serve, until it listens: beyond the server", added, "s", _MOST_START)


def _seconds_to_listen(command: Sequence[str]) -> float:
    """Return how long a server takes until clients can reach it, with its model loaded."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        is_listening = any(line.startswith(_LISTENING) for line in server.stdout)
        seconds = time.perf_counter() - began
        server.terminate()
    if not is_listening:
        raise RuntimeError(f"{' '.join(command)}: ended before it listened")
    return seconds


def _rows(name: str, speed: EngineSpeed, peers: Mapping[str, float | None]) -> Iterator[Row]:
    """Compare running a pack with llama.cpp alone, in the ways of `peers`, and with the shards."""
    if not speed.is_limited:
        yield Row(name, "no limit can be set")
        return
    sides = {side.name: side for side in speed.sides}
    assert speed.same_text, "they gave different texts"
    for peer, limit in {**peers, "shards": None}.items():
        yield _row(f"{name}: {peer}", sides["pack"], sides[peer], limit)
        prompt = f"{name}, {speed.prompt_count:,} tokens to the first: {peer}"
        yield _first_token_row(prompt, sides["pack"], sides[peer])


def _row(name: str, ours: SideFacts, theirs: SideFacts, limit: float | None) -> Row:
    speeds = ours.decode.tokens_per_second, theirs.decode.tokens_per_second
    return Row(
        name, _text(ours), _text(theirs), _ratio(*speeds), limit=limit, higher_is_better=True
    )


def _first_token_row(name: str, ours: SideFacts, theirs: SideFacts) -> Row:
    seconds = ours.first_token_seconds, theirs.first_token_seconds
    return Row(name, _first_token(ours), _first_token(theirs), _ratio(*seconds))


def _first_token(side: SideFacts) -> str:
    seconds, length = side.first_token_seconds, side.prompt.read_length
    if seconds is None:
        return "killed"
    read = "" if length is None else f", {size_text(length)} read"
    return f"{seconds.median:.3g} s{read}"


def _ratio(ours: Spread | None, theirs: Spread | None) -> Spread | None:
    if ours is None or theirs is None:
        return None
    return Spread(
        ours.median / theirs.median, ours.lowest / theirs.highest, ours.highest / theirs.lowest
    )


def _text(side: SideFacts) -> str:
    speed = side.decode.tokens_per_second
    if speed is None:
        return "killed"
    hits = "" if side.decode.hit_rate is None else f", {side.decode.hit_rate:.0%} hits"
    return f"{speed.median:.3g} tok/s{hits}"
