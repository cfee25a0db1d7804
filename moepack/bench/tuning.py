"""Options of `serve` that make a model faster on this machine: each is tried, and kept if it wins.

One option after the other: the values that it may have are measured in turns with the best options
so far, there and back again, so that a drive that warms up favours none. A value is kept if it is
faster in both rounds, by LEAST_GAIN, and gives the same text. At the end the options together are
compared with the defaults in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from moepack.bench.engine_speed import beginning_of, reference_text
from moepack.bench.measuring import Spread, in_turns, spread
from moepack.common.errors import MachineError, RequestError
from moepack.common.escaping import shell_words
from moepack.common.paths import PathOrPaths, path_list
from moepack.common.sizes import Size
from moepack.host.processors import cpu_count
from moepack.pack.opening.open_model import open_model
from moepack.running.serving.calls import serve
from moepack.running.serving.client import ServerClient
from moepack.running.serving.sampling import Sampling
from moepack.storage import page_cache
from moepack.traces.caching.cache import DEFAULT_POLICY, POLICIES

LEAST_GAIN = 0.03
_ROUNDS = 2
_DEFAULT = "default"
_MICRO_BATCHES = (256, 512, 1024, 2048, 4096)
_BATCH = 2048
"""llama-server's default."""
_SPARE_TOKENS = 64
_OF_SERVER = ("-ub", "-np")
"""Options that `moepack serve` passes on."""
_GREEDY = Sampling(temperature=0)

Settings = dict[str, str]
"""Values by option, `policy` and `backend` of moepack, others of llama-server; without those that
keep their default."""


@dataclass(frozen=True, slots=True)
class TrialFacts:
    """A value of an option: the seconds of its runs, and whether it gave the same text.

    `refusal` says why it did not run. Both are None if unknown.
    """

    value: str
    seconds: Spread | None
    same_text: bool | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class OptionTrials:
    """The values that were tried of an option; the first is the one so far. `kept` is the best."""

    option: str
    trials: tuple[TrialFacts, ...]
    kept: str


@dataclass(frozen=True, slots=True)
class TuningFacts:
    """The options that were tried for a model, and the command line to use.

    Each run is `text_count` texts at once, of a prompt and `token_count` tokens. `options` together
    are `gain` times as fast as the defaults; empty, and None, if none are faster.
    """

    model: str
    prompt_count: int
    token_count: int
    text_count: int
    tried: tuple[OptionTrials, ...]
    options: Settings
    gain: float | None
    command: str


class _Run(NamedTuple):
    seconds: float
    texts: tuple[str, ...]


_Measure = Callable[[Settings], _Run]


def tune(
    model: PathOrPaths,
    *,
    memory: Size | None = None,
    prompt_tokens: int = 500,
    tokens: int = 100,
    texts: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> TuningFacts:
    """Try threads, micro-batches, policies, backends and slots for a model, and keep what wins.

    `memory` is for experts, as of `serve`. Each run is a new server without anything of the
    model in the page cache, which answers `texts` requests at once: the same prompt of
    `prompt_tokens`, and `tokens` more. `progress` is called after each run, with the number of all.

    Raises what `serve` raises for the model, and with the defaults.
    """
    with open_model(model) as pack:
        pack.require_files()
        files = pack.file_paths
        text = beginning_of(reference_text(), prompt_tokens, pack)
    context = texts * (prompt_tokens + tokens + _SPARE_TOKENS)
    base = ["-c", str(context)]
    options = [pair for pair in _values(prompt_tokens, texts) if pair[1]]
    count = _ROUNDS * (sum(1 + len(values) for _, values in options) + 2)

    def measure(settings: Settings) -> _Run:
        page_cache.drop(files)
        try:
            return _measure(model, memory, [*base, *_server_words(settings)], settings, request)
        finally:
            if progress is not None:
                progress(1, count)

    request = partial(_answers, text=text, tokens=tokens, count=texts)
    best: Settings = {}
    tried = []
    for option, values in options:
        trials, best = _try(option, values, best, measure)
        tried.append(trials)
    gain = _gain(best, measure) if best else None
    if gain is None:
        best = {}
    path = os.fspath(path_list(model)[0])
    counts, command = (prompt_tokens, tokens, texts), _command(path, memory, best)
    return TuningFacts(path, *counts, tuple(tried), best, gain, command)


def _values(prompt_tokens: int, texts: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the values to try beside its default."""
    processors = cpu_count()
    yield "-t", [str(one) for one in sorted({max(1, processors // 2), processors})]
    sizes = [one for one in _MICRO_BATCHES if one <= prompt_tokens]
    yield "-ub", [str(one) for one in sizes[-3:]]
    yield "policy", [one for one in POLICIES if one != DEFAULT_POLICY]
    yield "backend", ["uring", "direct", "buffered"]
    if texts > 1:
        yield "-np", [str(texts)]


def _try(
    option: str, values: Sequence[str], best: Settings, measure: _Measure
) -> tuple[OptionTrials, Settings]:
    """Measure the values of an option in turns with the best settings; return the better ones."""
    settings = {_DEFAULT: best, **{value: {**best, option: value} for value in values}}

    def attempt(value: str) -> _Run | str:
        if value == _DEFAULT:
            return measure(best)
        try:
            return measure(settings[value])
        except (MachineError, RequestError) as error:
            return str(error)

    outcomes = in_turns({value: partial(attempt, value) for value in settings}, _ROUNDS)
    base = [run for run in outcomes[_DEFAULT] if isinstance(run, _Run)]
    trials, kept = [], _DEFAULT
    least = sum(run.seconds for run in base)
    for value, results in outcomes.items():
        runs = [run for run in results if isinstance(run, _Run)]
        if len(runs) < len(results):
            refusal = next(one for one in results if isinstance(one, str))
            trials.append(TrialFacts(value, None, None, refusal))
            continue
        same = {run.texts for run in runs} == {base[0].texts}
        trials.append(TrialFacts(value, spread([run.seconds for run in runs]), same))
        total = sum(run.seconds for run in runs)
        if same and total < least and _wins(runs, base):
            kept, least = value, total
    return OptionTrials(option, tuple(trials), kept), settings[kept]


def _wins(runs: Sequence[_Run], base: Sequence[_Run]) -> bool:
    """Return whether each run is faster than the one of the same round, by LEAST_GAIN."""
    pairs = zip(runs, base, strict=True)
    return all(one.seconds * (1 + LEAST_GAIN) <= other.seconds for one, other in pairs)


def _gain(best: Settings, measure: _Measure) -> float | None:
    """Return how many times as fast the settings are as the defaults; None if they are not."""
    runs = in_turns({"tuned": partial(measure, best), _DEFAULT: partial(measure, {})}, _ROUNDS)
    tuned, base = runs["tuned"], runs[_DEFAULT]
    if {run.texts for run in tuned} != {base[0].texts} or not _wins(tuned, base):
        return None
    return sum(run.seconds for run in base) / sum(run.seconds for run in tuned)


def _measure(
    model: PathOrPaths,
    memory: Size | None,
    words: Sequence[str],
    settings: Settings,
    request: Callable[..., tuple[str, ...]],
) -> _Run:
    """Start a server, and return how long its texts take, without its start."""
    ours: dict[str, Any] = {
        name: value for name, value in settings.items() if not name.startswith("-")
    }
    with serve(model, memory=memory, learn=False, options=words, **ours) as server:
        client = server.client  # waits until the model is loaded
        start = perf_counter()
        texts = request(client)
        return _Run(perf_counter() - start, texts)


def _answers(client: ServerClient, *, text: str, tokens: int, count: int) -> tuple[str, ...]:
    """Request the same text several times at once, and return the answers."""

    def answer(_number: int) -> str:
        with client.complete(
            text, count=tokens, sampling=_GREEDY, more={"ignore_eos": True}
        ) as one:
            return "".join(one)

    with ThreadPoolExecutor(count) as threads:
        return tuple(threads.map(answer, range(count)))


def _size_text(length: int) -> str:
    """Write bytes as options have them, in whole GiB, or in MiB."""
    whole, rest = divmod(length, 1 << 30)
    return f"{length >> 20}MiB" if rest else f"{whole}GiB"


def _server_words(settings: Settings) -> list[str]:
    """Return options of llama-server: no micro-batch is longer than a batch."""
    words = [word for pair in settings.items() if pair[0].startswith("-") for word in pair]
    longest = max(int(settings.get("-ub", 0)), _BATCH)
    return [*words, "-b", str(longest)] if longest > _BATCH else words


def _command(path: str, memory: Size | None, settings: Settings) -> str:
    words = ["moepack", "serve", path]
    if memory is not None:
        words += ["--memory", memory if isinstance(memory, str) else _size_text(memory)]
    of_server = {name: value for name, value in settings.items() if name in _OF_SERVER}
    for name, value in settings.items():
        words += [] if name in of_server else [name if name == "-t" else f"--{name}", value]
    rest = _server_words(of_server)
    return shell_words([*words, "--", *rest] if rest else words)
