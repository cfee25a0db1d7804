"""Forecasts beside runs on this machine: `python -m benchmarks.forecasts [--trace FILE]`.

The folder keeps the models, which route as a trace does, or by routing that is made up. The
machine is measured as `moepack machine` does; then `moepack serve` runs each model with some shares
of its experts in memory, a text from cold and once more. Forecasts are made as the command makes
them, with the text's own trace and without one; for uniform routers only with one, as no trained
model routes so.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import moepack
from benchmarks import program
from benchmarks.routed import SIZES, Model, Texts
from benchmarks.routing import Routing, made_up_routing, read_routing
from benchmarks.table import Row
from moepack.planning.machine.model import Machine
from moepack.storage import page_cache

_MODELS = {"small": (48, "small"), "uniform": (8, "real"), "real": (48, "real")}
"""Layers, and the size of experts."""


class Comparison(NamedTuple):
    """A figure's forecast with its range, and what was measured."""

    likely: float
    lowest: float
    highest: float
    measured: float

    def rows(self, case: str, what: str, unit: str) -> Iterator[Row]:
        """Compare what was measured with the forecast, and with its range."""
        ends = ("", self.likely), (", at least", self.lowest), (", at most", self.highest)
        for name, figure in ends:
            yield Row(case, f"{what}{name}", unit, [self.measured], [figure])


def write_trace(path: Path, texts: Texts) -> Path:
    """Write the routing of a text, its prompt's tokens first."""
    lines = ["turn,phase,step,layer,slot,expert,weight"]
    for step, tokens in enumerate(texts.steps()):
        for token, layers in enumerate(tokens):
            phase = f"0,0,{token}" if step == 0 else f"0,1,{step - 1}"
            for layer, experts in enumerate(layers):
                lines += (f"{phase},{layer},{n},{one},1" for n, one in enumerate(experts))
    path.write_text("\n".join(lines) + "\n")
    return path


def run_twice(pack: Path, texts: Texts, memory: int) -> tuple[float, float]:
    """Return the tokens a second of a text's second run, and the first one's first token's time."""
    with moepack.open(pack) as opened:
        page_cache.drop(opened.file_paths)
    options = texts.options()
    with moepack.serve(pack, memory=memory, learn=False, options=options) as server:
        cold, warm = (texts.ask(server.client, texts.token_count) for _ in range(2))
    return warm.tokens_per_second, cold.first_token_seconds


def compare(
    pack: Path, texts: Texts, machine: Machine, budget: int, traces: Sequence[str]
) -> Iterator[tuple[Comparison, Comparison]]:
    """Run a text; yield its speed and the time of its first token, each by one forecast more.

    With `traces`, and without if the routing is not uniform.
    """
    speed, first_token = run_twice(pack, texts, budget)
    for evidence in [traces, ()] if "uniform" not in texts.routing.origin else [traces]:
        (one,) = moepack.forecast(
            pack,
            machine,
            budget=budget,
            dense_in_memory=True,
            traces=evidence,
            prompt=texts.prompt_count,
            micro_batch=512,
        ).forecasts
        prompt = one.prompt
        yield (
            _compared((one.tokens_per_second, one.lowest, one.highest), speed),
            _compared((prompt.seconds, prompt.shortest, prompt.longest), first_token),
        )


def _compared(figures: tuple[float | None, ...], measured: float) -> Comparison:
    likely, lowest, highest = (np.nan if figure is None else figure for figure in figures)
    return Comparison(likely, lowest, highest, measured)


def measure(
    name: str, pack: Path, texts: Texts, machine: Machine, shares: Sequence[float], folder: Path
) -> Iterator[Row]:
    """Compare each share of the experts in memory, by each kind of evidence."""
    trace = str(write_trace(folder / "trace.csv", texts))
    with moepack.open(pack) as opened:
        length = opened.shape.expert_length
    for share in shares:
        budget = int(share / 100 * length)
        pairs = compare(pack, texts, machine, budget, [trace])
        for evidence, (speed, first) in zip(("with", "without"), pairs, strict=False):
            case = f"{name}, {share:.0f} %, {evidence} its trace"
            yield from speed.rows(case, "speed", "tok/s")
            yield from first.rows(case, "first token", "s")


def _routing(name: str, trace: Path | None, layers: int) -> Routing:
    if trace is None or name == "uniform":
        return made_up_routing(layers, is_uniform=name == "uniform")
    return read_routing(trace).first_layers(layers)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = program.new_parser("benchmarks.forecasts", __doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=["small", "uniform"])
    parser.add_argument("--shares", nargs="+", type=float, default=[12, 25, 46], help="in %%")
    parser.add_argument("--seconds", type=float, default=15, help="of measuring the machine")
    return parser


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the machine before each model, then its runs."""
    for name in options.models:
        layers, size = _MODELS[name]
        routing, folder = _routing(name, options.trace, layers), options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        model = Model(folder, routing, SIZES[size], noise=1.0)
        yield Row(name, "", note=model.describe(routing))
        machine = moepack.measure_machine(model.pack, seconds=options.seconds).machine
        texts = Texts(routing)
        yield from measure(name, model.pack, texts, machine, options.shares, folder)


if __name__ == "__main__":
    sys.exit(program.measure(parser(), rows))
