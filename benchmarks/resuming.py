"""Going on with a conversation after the server was stopped, by the state that it keeps on disk.

`python -m benchmarks.resuming PACK` measures a model that is there already.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import moepack
from benchmarks import program
from benchmarks.table import Row
from moepack.bench.engine_speed import reference_text
from moepack.common.sizes import size_text
from moepack.running.serving.client import ServerClient
from moepack.running.serving.sampling import Sampling
from moepack.storage import page_cache

_SHARE = 0.45
"""Of the experts, what memory holds."""
_PROMPT_TOKENS = 2000
_TOKENS = 32
_NEXT = "\n\nAnd what does that mean for the reader?"
_GREEDY = Sampling(temperature=0)
_SIZES = ("-c", "4096", "-np", "1", "--cache-ram", "0")


class Turn(NamedTuple):
    """An answer: its text, the time to its first token, and the tokens computed for its prompt.

    The server's end took `closing_seconds`, in which it may have saved the text.
    """

    text: str
    seconds: float
    prompt_count: int
    computed_count: int
    closing_seconds: float


def rows(pack: Path, rounds: int) -> Iterator[Row]:
    """Compare going on after a restart, from what was saved, with computing it all again."""
    with moepack.open(pack) as opened:
        memory = int(_SHARE * opened.shape.expert_length)
        files = list(opened.file_paths)
    with tempfile.TemporaryDirectory(prefix="moepack-bench-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder

        def answer(*prompts: str, keeps: bool) -> list[Turn]:
            states = list(Path(folder).glob("moepack/prompts/*/*.state"))
            page_cache.drop([*files, *states])
            with moepack.serve(
                pack,
                memory=memory,
                learn=False,
                options=_SIZES,
                prompt_cache=None if keeps else 0,
            ) as server:
                turns = [_turn(server.client, prompt) for prompt in prompts]
                began = time.monotonic()
            seconds = time.monotonic() - began
            return [turn._replace(closing_seconds=seconds) for turn in turns]

        with moepack.serve(pack, memory="floor", learn=False, options=_SIZES) as server:
            tokens = server.client.tokenize(reference_text())[:_PROMPT_TOKENS]
            prompt = server.client.detokenize(tokens)
        (begun,) = answer(prompt, keeps=True)
        (state,) = Path(folder).glob("moepack/prompts/*/*.state")
        length = state.stat().st_size
        prompt_after = prompt + begun.text + _NEXT
        before, expected = answer(prompt, prompt_after, keeps=False)
        resumed = [turn for _ in range(rounds) for turn in answer(prompt_after, keeps=True)]
        again = [turn for _ in range(rounds) for turn in answer(prompt_after, keeps=False)]
    # Computed again, the answer is part of the prompt's batches, which round otherwise.
    assert {turn.text for turn in resumed} == {expected.text}, "they gave different texts"
    last = resumed[-1]
    yield Row("going on", "", note=_set_up(last, length))
    mine, others = ([turn.seconds for turn in turns] for turns in (resumed, again))
    yield Row("the first token after a restart: computing all again", "time", "s", mine, others)
    closing = [begun.closing_seconds], [before.closing_seconds]
    yield Row("the server's end, with saving: without", "time", "s", *closing)


def _set_up(last: Turn, length: int) -> str:
    return (
        f"a prompt of {_PROMPT_TOKENS:,} tokens and an answer of {_TOKENS}, kept in "
        f"{size_text(length)}; {last.computed_count} of {last.prompt_count:,} tokens are computed "
        f"of the next one; {_SHARE:.0%} of the experts in memory"
    )


def _turn(client: ServerClient, prompt: str) -> Turn:
    with client.complete(prompt, count=_TOKENS, sampling=_GREEDY) as answer:
        for _ in answer:
            pass
    facts = answer.facts
    assert facts.first_token_seconds is not None
    computed_count = facts.prompt.step_count
    return Turn(answer.text, facts.first_token_seconds, facts.prompt_count, computed_count, 0.0)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = program.new_parser("benchmarks.resuming", __doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(program.measure(parser(), lambda options: rows(options.pack, options.rounds)))
