"""Running a model that routes as a real one did, with some of its experts in memory, in turns.

`python -m benchmarks.routed --trace FILE` repeats a trace; without one, routing is made up that is
as skewed and as persistent as a real model's. Tokens are checked: a wrong one ends the benchmark.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import moepack
from benchmarks import fio, program
from benchmarks.routing import Routing, lru_reads, made_up_routing, read_routing
from benchmarks.runnable import FIRST_TOKEN, Dimensions, Routers, write_runnable
from benchmarks.table import Row
from moepack.bench.control_group import control_group
from moepack.bench.engine_runs import LOADINGS, MAPPED, PROGRAM_LENGTH
from moepack.bench.measuring import in_turns
from moepack.common.sizes import size_text
from moepack.running.serving.client import ServerClient
from moepack.running.serving.model_server import ServerProcess
from moepack.storage import page_cache
from tests.support.supervised import slot_lengths

SHARES = (0.12, 0.25, 0.46, 1.0)
"""Of the experts, what memory holds."""
SIZES = {"small": (1024, 256), "real": (2048, 768)}
"""The embedding and the width of experts: 0.5 MB each and 2.7 GiB in all, or 2.8 MB and 18 GiB."""
_LEAST_SHARE = 0.98
"""Of the speed of the program alone, where all fit and are there."""
_MAPPED_TOKENS = 12
"""Fewer, since each reads much of the model."""
_MICRO_BATCH = 512
_ALONE, _WARM, _BARE = ("", "alone"), ", warm", ", without prefetching"
_FIO_SECONDS, _FIO_DEPTH = 2, 8
_SPINS = {"GOMP_SPINCOUNT": "1000"}
"""How long threads of the program alone spin: as under moepack, so that both take turns alike."""


class Run(NamedTuple):
    """One measured run: speed after the first token, the time to it, lookups and bytes read.

    Of several texts speeds are added up, and the last one's first token counts. `hit_rate` and
    `read_length` include prompts; `drive_speed` is bytes a second that fio read after the run. None
    is what is not known.
    """

    tokens_per_second: float
    first_token_seconds: float
    hit_rate: float | None = None
    read_length: int | None = None
    drive_speed: float | None = None


@dataclass(frozen=True)
class Texts:
    """What is asked: texts at once, each from another place of the routing on."""

    routing: Routing
    count: int = 1
    prompt_count: int = 28
    token_count: int = 127

    def ids(self, text: int, start: int, end: int) -> list[int]:
        """Return tokens of a text, its prompt's first; after the routing's last comes its first."""
        length = len(self.routing.tokens)
        first = text * length // self.count
        return [FIRST_TOKEN + (first + number) % length for number in range(start, end)]

    def options(self) -> list[str]:
        """Return the options of a server that answers all texts at once."""
        context = self.count * max(1024, self.prompt_count + self.token_count + 64)
        sizes = ["-c", str(context), "-np", str(self.count), "-ub", str(_MICRO_BATCH)]
        return [*sizes, "--cache-ram", "0"]

    def ask(self, client: ServerClient, count: int) -> Run:
        """Have all texts continued by so many tokens, which have to be those of the routing."""
        with ThreadPoolExecutor(self.count) as pool:
            runs = list(pool.map(partial(self._ask, client, count), range(self.count)))
        return Run(
            sum(run.tokens_per_second for run in runs),
            max(run.first_token_seconds for run in runs),
        )

    def describe(self) -> str:
        """Return the texts, for people."""
        return (
            f"a prompt of {self.prompt_count} tokens and {self.token_count} greedy ones, "
            f"micro-batch of {_MICRO_BATCH}"
        )

    def _ask(self, client: ServerClient, count: int, text: int) -> Run:
        fields = {
            "prompt": self.ids(text, 0, self.prompt_count),
            "n_predict": count,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        answer = client.request("/completion", fields)
        if answer["tokens"] != self.ids(text, self.prompt_count, self.prompt_count + count):
            raise SystemExit(f"wrong tokens: {answer['tokens']}")
        timings = answer["timings"]
        return Run(timings["predicted_per_second"], timings["prompt_ms"] / 1000)

    def steps(self) -> list[list[Sequence[Sequence[int]]]]:
        """Return the routing of all tokens that are computed at once, step by step."""
        prompts = range(0, self.prompt_count, _MICRO_BATCH)
        spans = [(start, min(start + _MICRO_BATCH, self.prompt_count)) for start in prompts]
        last = self.prompt_count + self.token_count - 1
        spans += [(number, number + 1) for number in range(self.prompt_count, last)]
        texts = range(self.count)
        return [
            [self._routed(text, number) for text in texts for number in range(start, end)]
            for start, end in spans
        ]

    def _routed(self, text: int, number: int) -> Sequence[Sequence[int]]:
        """Return the experts of a token; the last layer computes only the last of a prompt."""
        (token,) = self.ids(text, number, number + 1)
        layers = self.routing.tokens[token - FIRST_TOKEN]
        return layers if number >= self.prompt_count - 1 else [*layers[:-1], []]


class Model:
    """A model on disk whose routers repeat a routing, as a GGUF and as a pack."""

    def __init__(self, folder: Path, routing: Routing, size: tuple[int, int], noise: float) -> None:
        embedding, n_ff = size
        dimensions = Dimensions(
            routing.layer_count, embedding, n_ff, routing.expert_count, routing.used_count
        )
        self.source, self.pack = folder / "routed.gguf", folder / "routed.moepack"
        if not self.pack.exists():
            write_runnable(self.source, dimensions, Routers(routing, dimensions, noise))
            moepack.pack_model(self.source, self.pack)
        self.slot_lengths = slot_lengths(self.pack)
        self.expert_length = sum(self.slot_lengths.values())
        self.length = self.source.stat().st_size
        with moepack.open(self.pack) as opened:
            self._files = [*opened.file_paths, self.source]

    def describe(self, routing: Routing) -> str:
        """Return the model and where its routing is from, for people."""
        return (
            f"{routing.layer_count} layers, {routing.used_count} of {routing.expert_count} experts "
            f"of {size_text(self.expert_length // len(self.slot_lengths))}, "
            f"{size_text(self.length)}; routing: {routing.origin}"
        )

    def run(self, texts: Texts, memory: int, is_warm: bool = False, prefetch: bool = True) -> Run:
        """Measure moepack with so many bytes of experts, from cold, or asked for a second time."""
        page_cache.drop(self._files)
        options = texts.options()
        with moepack.serve(
            self.pack, memory=memory, learn=False, prefetch=prefetch, options=options
        ) as server:
            client = server.client
            if is_warm:
                texts.ask(client, texts.token_count)
            before = server.usage  # the server has computed two tokens to try the model
            run = texts.ask(client, texts.token_count)
            after = server.usage
        hits, misses = after.hit_count - before.hit_count, after.miss_count - before.miss_count
        length = after.read_length - before.read_length
        return run._replace(
            hit_rate=hits / (hits + misses) if hits + misses else None,
            read_length=length,
            drive_speed=self._drive_speed() if memory < self.expert_length else None,
        )

    def _drive_speed(self) -> float | None:
        if not fio.is_installed():
            return None
        length = min(self.slot_lengths.values())
        duration = ("--time_based", f"--runtime={_FIO_SECONDS}")
        usage = fio.random_reads(self.source, length, _FIO_DEPTH, *duration)
        return usage.length / usage.seconds

    def run_alone(self, texts: Texts) -> Run:
        """Measure llama.cpp alone, with all of the model in memory, asked for a second time."""
        return self._run_mapped(texts, [], texts.token_count, is_warm=True)

    def run_mapped(self, texts: Texts, memory: int) -> Run:
        """Measure llama.cpp that maps the model, within the memory that moepack takes."""
        limit = memory + self.length - self.expert_length + PROGRAM_LENGTH
        page_cache.drop(self._files)
        with control_group(limit) as group:
            if group is None:
                raise SystemExit("no limit on memory can be set")
            return self._run_mapped(texts, group.command([]), _MAPPED_TOKENS)

    def _run_mapped(
        self, texts: Texts, prefix: Sequence[str], count: int, is_warm: bool = False
    ) -> Run:
        options = [*LOADINGS[MAPPED], *texts.options()]
        server: AbstractContextManager[ServerProcess] = ServerProcess(
            str(self.source), options=options, environment=_SPINS, prefix=prefix
        )
        with server as process:
            if is_warm:
                texts.ask(process.client, count)
            return texts.ask(process.client, count)


def rows(
    model: Model,
    texts: Texts,
    rounds: int,
    shares: Sequence[float] = SHARES,
    *,
    mapped: bool = False,
) -> Iterator[Row]:
    """Compare each share of the experts in memory with the program alone, which has all.

    Each is measured with and without prefetching what the next layer's router names; `mapped` adds
    llama.cpp within the same memory.
    """
    budgets: dict[str, int] = {}
    sides: dict[tuple[str, str], Callable[[], Run]] = {_ALONE: partial(model.run_alone, texts)}
    for share in shares:
        budget = int(share * model.expert_length)
        case = f"{100 * share:.0f} %, {budget / 1e9:.2g} GB"
        budgets[case] = budget
        sides[case, ""] = partial(model.run, texts, budget)
        if budget < model.expert_length:
            sides[case, _BARE] = partial(model.run, texts, budget, prefetch=False)
            if mapped:
                sides[case, MAPPED] = partial(model.run_mapped, texts, budget)
        else:
            sides[case, _WARM] = partial(model.run, texts, budget, is_warm=True)
    runs = in_turns(sides, rounds)
    alone, steps = runs.pop(_ALONE), texts.steps()
    suffix = "" if texts.count == 1 else f", {texts.count} texts"
    for (case, mode), ours in runs.items():
        if mode == MAPPED:
            peer = f"llama.cpp, mapped{suffix}"
            yield Row(case, peer, "tok/s", _speeds(runs[case, ""]), _speeds(ours))
            continue
        yield from _speed_rows(case, f"{mode}{suffix}", ours, alone)
        if budgets[case] < model.expert_length:
            least = lru_reads(steps, budgets[case], model.slot_lengths) / 1e9
            lengths = [(run.read_length or 0) / 1e9 for run in ours]
            yield Row(case, f"reads of LRU{mode}{suffix}", "GB", lengths, [least] * rounds)
            if drive := [run.drive_speed / 1e9 for run in ours if run.drive_speed]:
                yield Row(case, f"fio after it{mode}{suffix}", "GB/s", drive)


def _speed_rows(case: str, suffix: str, ours: Sequence[Run], alone: Sequence[Run]) -> Iterator[Row]:
    limit = _LEAST_SHARE if suffix == _WARM else None
    speeds = _speeds(ours), _speeds(alone)
    yield Row(case, f"alone{suffix}", "tok/s", *speeds, limit=limit, higher_is_better=True)
    mine, others = ([run.first_token_seconds for run in runs] for runs in (ours, alone))
    yield Row(case, f"first token{suffix}", "s", mine, others)
    if hits := [100 * run.hit_rate for run in ours if run.hit_rate is not None]:
        yield Row(case, f"hits{suffix}", "%", hits)


def _speeds(runs: Sequence[Run]) -> list[float]:
    return [run.tokens_per_second for run in runs]


def models(folder: Path, rounds: int, trace: Path | None = None) -> Iterator[Row]:
    """Run a small model that repeats a trace, or routing that is made up, by one text and four."""
    routing = made_up_routing() if trace is None else read_routing(trace)
    model = Model(folder, routing, SIZES["small"], noise=1.0)
    yield Row("routed", "", note=model.describe(routing))
    yield from rows(model, Texts(routing), rounds)
    yield from rows(model, Texts(routing, count=4), rounds, SHARES[1:3])


def run_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure what the options say."""
    routing = (
        made_up_routing(is_uniform=options.uniform)
        if options.trace is None
        else read_routing(options.trace)
    )
    routing = routing.first_layers(options.layers)
    with tempfile.TemporaryDirectory(prefix="moepack-bench-", dir=options.folder) as folder:
        model = Model(options.model or Path(folder), routing, SIZES[options.size], options.noise)
        yield Row("routed", "", note=model.describe(routing))
        for count in options.texts:
            texts = Texts(routing, count, options.prompt_tokens, options.tokens)
            yield Row(f"{count} texts", "", note=texts.describe())
            shares = [percent / 100 for percent in options.shares]
            yield from rows(model, texts, options.rounds, shares, mapped=options.mapped)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = program.new_parser("benchmarks.routed", __doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, help="a trace in any format that moepack reads")
    source.add_argument("--uniform", action="store_true", help="all experts equally likely")
    parser.add_argument("--size", choices=SIZES, default="small", help="of an expert")
    parser.add_argument("--layers", type=int, default=48, help="the most")
    parser.add_argument("--noise", type=float, default=1.0, help="see benchmarks/runnable.py")
    parser.add_argument("--shares", type=float, nargs="+", default=[12, 25, 46, 100], help="in %%")
    parser.add_argument("--texts", type=int, nargs="+", default=[1], help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=127)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mapped", action="store_true", help="llama.cpp within the same memory")
    parser.add_argument("--model", type=Path, help="a folder that keeps the model")
    return parser


if __name__ == "__main__":
    sys.exit(program.measure(parser(), run_rows))
