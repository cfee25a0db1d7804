"""Going on with a conversation after the server was stopped, by the state that it saves to disk.

`python -m benchmarks.resuming PACK` measures a model that is there already.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import moepack
from benchmarks.table import Row, print_rows
from moepack.bench.engine_speed import reference_text
from moepack.bench.measuring import spread
from moepack.common.sizes import size_text
from moepack.running.serving.client import ServerClient
from moepack.running.serving.sampling import Sampling
from moepack.storage import page_cache

_SHARE = 0.45
"""Of the experts, what memory holds."""
_PROMPT_TOKENS = 2000
_TOKENS = 32
_STATE = "conversation.bin"
_NEXT = "\n\nAnd what does that mean for the reader?"
_GREEDY = Sampling(temperature=0)
_SIZES = ("-c", "4096", "-np", "1", "--cache-ram", "0")


class Turn(NamedTuple):
    """An answer: its text, the time to its first token, and the tokens computed for its prompt.

    `restoring_seconds` went by before, until what had been saved was there.
    """

    text: str
    seconds: float
    prompt_count: int
    computed_count: int
    restoring_seconds: float


def rows(name: str, pack: Path, rounds: int) -> Iterator[Row]:
    """Compare going on after a restart, from what was saved, with computing it all again."""
    with moepack.open(pack) as opened:
        memory = int(_SHARE * opened.shape.expert_length)
        files = list(opened.file_paths)
    with tempfile.TemporaryDirectory(prefix="moepack-bench-") as folder:
        options = [*_SIZES, "--slot-save-path", folder]

        def answer(prompt: str, restores: bool) -> Turn:
            page_cache.drop([*files, Path(folder, _STATE)])
            with moepack.serve(pack, memory=memory, learn=False, options=options) as server:
                return _turn(server.client, prompt, restores)

        page_cache.drop(files)
        with moepack.serve(pack, memory=memory, learn=False, options=options) as server:
            client = server.client
            tokens = client.tokenize(reference_text())[:_PROMPT_TOKENS]
            prompt = client.detokenize(tokens)
            begun = _turn(client, prompt, restores=False)
            client.request("/slots/0?action=save", {"filename": _STATE})
            prompt += begun.text + _NEXT
            expected = _turn(client, prompt, restores=False).text
        length = Path(folder, _STATE).stat().st_size
        resumed = [answer(prompt, restores=True) for _ in range(rounds)]
        again = [answer(prompt, restores=False) for _ in range(rounds)]
    # Computed again, the answer is part of the prompt's batches, which round otherwise.
    assert {turn.text for turn in resumed} == {expected}, "they gave different texts"
    ratios = [
        (mine.restoring_seconds + mine.seconds) / other.seconds
        for mine, other in zip(resumed, again, strict=True)
    ]
    last = resumed[-1]
    yield Row(
        f"{name}: go on after a restart, {_PROMPT_TOKENS:,} tokens, against computing them",
        f"{_seconds(resumed):.2f} s to the first token, {last.computed_count} of "
        f"{last.prompt_count:,} computed, {size_text(length)} restored in "
        f"{median(turn.restoring_seconds for turn in resumed):.2f} s of it",
        f"{_seconds(again):.2f} s",
        spread(ratios),
    )


def _seconds(turns: list[Turn]) -> float:
    return median(turn.restoring_seconds + turn.seconds for turn in turns)


def _turn(client: ServerClient, prompt: str, restores: bool) -> Turn:
    began = time.monotonic()
    if restores:
        client.request("/slots/0?action=restore", {"filename": _STATE})
    restored = time.monotonic()
    with client.complete(prompt, count=_TOKENS, sampling=_GREEDY) as answer:
        for _ in answer:
            pass
    facts = answer.facts
    assert facts.first_token_seconds is not None
    return Turn(
        answer.text,
        facts.first_token_seconds,
        facts.prompt_count,
        facts.prompt.step_count,
        restored - began if restores else 0.0,
    )


def main() -> None:
    """Measure a model that is there."""
    print_rows(rows("even", Path(sys.argv[1]), rounds=1))


if __name__ == "__main__":
    main()
