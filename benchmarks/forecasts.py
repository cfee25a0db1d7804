"""Forecasts beside runs on this machine: `python -m benchmarks.forecasts FOLDER [--trace FILE]`.

FOLDER keeps the models, which route as a trace does, or by routing that is made up. The machine is
measured as `moepack machine` does; then `moepack serve` runs each model with some shares of its
experts in memory, a text from cold and once more. Forecasts are made as the command makes them,
with the text's own trace and without one; for uniform routers only with one, as no trained model
routes so.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import moepack
from benchmarks.routed import SIZES, Model, Texts
from benchmarks.routing import Routing, made_up_routing, read_routing
from moepack.planning.machine.model import Machine
from moepack.storage import page_cache

_MODELS = {"small": (48, "small"), "uniform": (8, "real"), "real": (48, "real")}
"""Layers, and the size of experts."""
_HEADING = """\
| model, experts in memory | evidence | tok/s: forecast | measured | first token, s | measured |
| --- | --- | --- | --- | --- | --- |"""


class Comparison(NamedTuple):
    """A figure's forecast with its range, and what was measured."""

    likely: float
    lowest: float
    highest: float
    measured: float

    @property
    def error(self) -> float:
        """The measured figure over the forecast one, less 1; of a slower machine below 0."""
        return self.measured / self.likely - 1

    @property
    def is_within(self) -> bool:
        """Whether the range contains what was measured."""
        return self.lowest <= self.measured <= self.highest

    def __str__(self) -> str:
        texts = [f"{value:.3g}" for value in self]
        outside = "" if self.is_within else ", outside"
        return f"{texts[0]} ({texts[1]} to {texts[2]}) | {texts[3]}{outside}"


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


def summary(name: str, several: Sequence[Comparison]) -> str:
    """Return the errors of several forecasts, and how many ranges contain what was measured."""
    errors = [abs(one.error) for one in several]
    within = sum(one.is_within for one in several)
    return (
        f"{name}: median error {np.median(errors):.0%}, worst {max(errors):.0%}; "
        f"{within} of {len(several)} within their ranges"
    )


def measure(
    name: str, pack: Path, texts: Texts, machine: Machine, shares: Sequence[float], folder: Path
) -> Iterator[tuple[Comparison, Comparison]]:
    """Print a row for each share and evidence, and yield its comparisons."""
    trace = str(write_trace(folder / "trace.csv", texts))
    with moepack.open(pack) as opened:
        length = opened.shape.expert_length
    for share in shares:
        budget = int(share / 100 * length)
        pairs = compare(pack, texts, machine, budget, [trace])
        for evidence, (speed, first) in zip(("trace", "none"), pairs, strict=False):
            print(f"| {name}, {share:.0f} % | {evidence} | {speed} | {first} |", flush=True)
            yield speed, first


def _routing(name: str, trace: Path | None, layers: int) -> Routing:
    if trace is None or name == "uniform":
        return made_up_routing(layers, is_uniform=name == "uniform")
    return read_routing(trace).first_layers(layers)


def main() -> None:
    """Print a table, and the errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecasts", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=["small", "uniform"])
    parser.add_argument("--shares", nargs="+", type=float, default=[12, 25, 46], help="in %%")
    parser.add_argument("--seconds", type=float, default=15, help="of measuring the machine")
    options = parser.parse_args()
    several: list[tuple[Comparison, Comparison]] = []
    for name in options.models:
        layers, size = _MODELS[name]
        routing, folder = _routing(name, options.trace, layers), options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        pack = Model(folder, routing, SIZES[size], noise=1.0).pack
        machine = moepack.measure_machine(pack, seconds=options.seconds).machine
        print(f"load {os.getloadavg()[0]:.1f}\n\n{_HEADING}", flush=True)
        several += measure(name, pack, Texts(routing), machine, options.shares, folder)
    speeds, times = zip(*several, strict=True)
    print(f"\n{summary('tokens a second', speeds)}\n{summary('first tokens', times)}")


if __name__ == "__main__":
    main()
