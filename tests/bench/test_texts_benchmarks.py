"""The benchmarks of several texts at once, and of going on after a restart, on a small model."""

import re
from pathlib import Path

import pytest

from benchmarks import resuming, several_texts
from benchmarks.several_texts import Moment, summarise
from moepack.bench.engine_runs import RunMemory
from moepack.running.pager.usage import PagerUsage
from tests.support.needs import needs_llama


def usage(hits: int, misses: int, length: int) -> PagerUsage:
    return PagerUsage(hits, misses, length, 0.0, 0, 0, 0, False, 0, 0)


def test_texts_are_compared_while_all_of_them_decode() -> None:
    """The first computes tokens before the second's prompt is done, which do not count."""
    first = [
        Moment(0, 1, usage(0, 10, 100)),
        Moment(2, 5, usage(4, 16, 160)),
        Moment(4, 9, usage(10, 20, 200)),
        Moment(6, 13, usage(20, 30, 300)),
    ]
    second = [Moment(2, 1, usage(4, 16, 160)), Moment(6, 5, usage(20, 30, 300))]
    decoding = summarise([first, second])
    assert decoding.tokens_per_second == (8 + 4) / 4
    assert decoding.evenness == 4 / 8
    assert decoding.hit_rate == 16 / 30
    assert decoding.length_per_token == 140 / 12


@needs_llama
def test_several_texts_are_answered_at_once(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_texts, "_TOKENS", 200)  # else a busy machine may see them at once
    decoding = several_texts._within(packs["qwen3moe"], RunMemory(700 << 10, 1), 2)
    assert decoding.tokens_per_second > 0
    assert 0 < decoding.evenness <= 1
    assert decoding.hit_rate is not None
    assert 0 < decoding.hit_rate < 1


@needs_llama
def test_going_on_computes_what_is_new_alone(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "_PROMPT_TOKENS", 300)
    monkeypatch.setattr(resuming, "_SHARE", 2)
    (row,) = resuming.rows("small", packs["qwen3moe"], 1)
    counts = re.search(r"(\d+) of (\d+) computed", row.moepack)
    assert counts is not None
    assert int(counts[1]) < 100
    assert int(counts[2]) > 300
