"""Several texts at once: what they make together, how alike they fare, and what they read.

`python -m benchmarks.several_texts PACK SOURCE [SHARE …]` measures a model that is there already.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import NamedTuple

import moepack
from benchmarks.table import Row, print_rows
from moepack.bench.control_group import ControlGroup, control_group
from moepack.bench.engine_runs import LOADINGS, MAPPED, PROGRAM_LENGTH, RunMemory, divide_memory
from moepack.bench.engine_speed import reference_text
from moepack.bench.measuring import in_turns, spread
from moepack.common.sizes import size_text
from moepack.pack.reading.pack import Pack
from moepack.running.programs.client import ServerClient
from moepack.running.programs.model_server import ServerProcess
from moepack.running.programs.sampling import Sampling
from moepack.running.streaming.usage import ExpertUsage
from moepack.storage import page_cache

SHARES = (0.25, 0.45)
"""Of the model, what memory holds."""
_COUNT = 4
_TOKENS = 32
_MAPPED_TOKENS = 12
"""Fewer, since each reads much of the model."""
_PROMPT = 120
"""Characters for each token that a text begins with, some two in the vocabulary that is used."""
_CONTEXT = 4096


class Moment(NamedTuple):
    """When so many tokens of a text were here, and what had been read by then.

    Tokens that end within a character come together with those that end it.
    """

    seconds: float
    token_count: int
    usage: ExpertUsage | None


class Decoding(NamedTuple):
    """The time in which all texts were at their tokens after the first: none computed its prompt.

    `evenness` is the tokens of the slowest text by those of the fastest. None is what is not known.
    """

    tokens_per_second: float
    evenness: float
    hit_rate: float | None
    length_per_token: float | None


def rows(
    name: str, pack: Path, source: Path, rounds: int, shares: Sequence[float] = SHARES
) -> Iterator[Row]:
    """Compare four texts at once with one, and with llama.cpp that maps the model, within limits.

    Each is a text of its own. Tokens are drawn by chance: the likeliest ones of a model with random
    weights soon repeat, and so do the experts that they choose.
    """
    for share in shares:
        title = f"{_COUNT} texts, {name}, {share:.0%} of it"
        limit = int(share * source.stat().st_size) + PROGRAM_LENGTH
        with control_group(limit) as group, Pack(pack) as opened:
            if group is None:
                yield Row(title, "no limit can be set")
                return
            memory = divide_memory(opened, limit, context=_CONTEXT, pinned=0)
            files = [*opened.file_paths, source]
            ours = partial(_in_group, group, files, pack, memory)
            sides: dict[str, Callable[[], Decoding]] = {
                "one": partial(ours, 1),
                "several": partial(ours, _COUNT),
            }
            found = in_turns(sides, rounds)
            mapped = _mapped(group, files, source, memory.micro_batch)  # once, as it takes long
        yield _row(f"{title}: one text", found["several"], found["one"])
        yield _row(f"{title}: {_COUNT} under llama.cpp, mapped", found["several"], [mapped])


def _row(name: str, ours: Sequence[Decoding], theirs: Sequence[Decoding]) -> Row:
    pairs = zip(ours, cycle(theirs), strict=False)
    ratios = [mine.tokens_per_second / other.tokens_per_second for mine, other in pairs]
    return Row(name, _text(ours), _text(theirs), spread(ratios), higher_is_better=True)


def _text(runs: Sequence[Decoding]) -> str:
    speed = median(run.tokens_per_second for run in runs)
    last = runs[-1]
    words = [f"{speed:.3g} tok/s"]
    if last.hit_rate is not None and last.length_per_token is not None:
        words.append(f"{last.hit_rate:.0%} hits, {size_text(round(last.length_per_token))} a token")
    lowest = min(run.evenness for run in runs)
    return ", ".join([*words, f"slowest/fastest {lowest:.2f}"])


def _in_group(
    group: ControlGroup, files: Sequence[Path], pack: Path, memory: RunMemory, count: int
) -> Decoding:
    """Measure in a process of its own, whose memory is limited."""
    page_cache.drop(files)
    words = [sys.executable, "-m", "benchmarks.several_texts", "--within", str(pack)]
    command = group.command([*words, *map(str, (*memory, count))])
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Decoding(*json.loads(done.stdout))


def _within(pack: Path, memory: RunMemory, count: int) -> Decoding:
    options = _options(memory.micro_batch)
    with moepack.serve(pack, memory=memory.experts, learn=False, options=options) as server:
        return _decode(server.client, count, _TOKENS, lambda: server.usage)


def _mapped(group: ControlGroup, files: Sequence[Path], source: Path, micro_batch: int) -> Decoding:
    page_cache.drop(files)
    options = [*LOADINGS[MAPPED], *_options(micro_batch)]
    with ServerProcess(str(source), options=options, prefix=group.command([])) as server:
        return _decode(server.client, _COUNT, _MAPPED_TOKENS, lambda: None)


def _options(micro_batch: int) -> list[str]:
    sizes = ["-c", str(_CONTEXT), "-np", str(_COUNT), "-ub", str(micro_batch)]
    return [*sizes, "--cache-ram", "0", "--ignore-eos"]


def _decode(
    client: ServerClient, count: int, tokens: int, usage: Callable[[], ExpertUsage | None]
) -> Decoding:
    """Have so many texts answered at once, by `tokens`; measure while all of them decode."""
    text = reference_text()
    starts = [number * len(text) // count for number in range(count)]
    prompts = [text[start : start + _PROMPT] for start in starts]
    with ThreadPoolExecutor(count) as pool:
        jobs = [
            pool.submit(_moments, client, prompt, tokens, number, usage)
            for number, prompt in enumerate(prompts)
        ]
        texts = [job.result() for job in jobs]
    return summarise(texts)


def summarise(texts: Sequence[Sequence[Moment]]) -> Decoding:
    """Return what all texts did between the last one's first token and the first one's last."""
    first = max((moments[0] for moments in texts), key=lambda moment: moment.seconds)
    last = min((moments[-1] for moments in texts), key=lambda moment: moment.seconds)
    counts = [_count(moments, last.seconds) - _count(moments, first.seconds) for moments in texts]
    evenness, total = min(counts) / max(counts), sum(counts)
    speed = total / (last.seconds - first.seconds)
    if first.usage is None or last.usage is None:
        return Decoding(speed, evenness, None, None)
    hits = last.usage.hit_count - first.usage.hit_count
    misses = last.usage.miss_count - first.usage.miss_count
    length = last.usage.read_length - first.usage.read_length
    lookups = hits + misses
    return Decoding(speed, evenness, hits / lookups if lookups else None, length / total)


def _count(moments: Sequence[Moment], seconds: float) -> int:
    """Return how many tokens of a text were here at a time."""
    return max(moment.token_count for moment in moments if moment.seconds <= seconds)


def _moments(
    client: ServerClient,
    prompt: str,
    tokens: int,
    seed: int,
    usage: Callable[[], ExpertUsage | None],
) -> list[Moment]:
    """Have a text answered; return when each of its tokens came, from the first on."""
    moments: list[Moment] = []
    sampling = Sampling(temperature=1, seed=seed)
    with client.complete(prompt, count=tokens, sampling=sampling) as answer:

        def note(facts: object) -> None:
            count = answer.facts.token_count
            if count > (moments[-1].token_count if moments else 0):
                moments.append(Moment(time.monotonic(), count, usage()))

        answer.on_event = note
        for _ in answer:
            pass
    return moments


def main() -> None:
    """Measure a model that is there, or, within limits, one side."""
    if sys.argv[1] == "--within":
        memory, micro_batch, count = map(int, sys.argv[3:])
        print(json.dumps(_within(Path(sys.argv[2]), RunMemory(memory, micro_batch), count)))
        return
    pack, source, *shares = sys.argv[1:]
    given = [float(share) for share in shares] or SHARES
    print_rows(rows("even", Path(pack), Path(source), rounds=2, shares=given))


if __name__ == "__main__":
    main()
