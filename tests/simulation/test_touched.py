"""Which share of a layer's experts some tokens in a row choose, counted on traces."""

import itertools
from pathlib import Path

import pytest

from moepack.errors import TraceError
from moepack.simulation.touched import touched_shares
from moepack.trace.formats.registry import ReadOptions
from tests.support.shapes import shape_of_counts

HEADING = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
CHOSEN = [{0: 0, 1: 0}, {0: 1, 1: 0}, {0: 1, 1: 2}, {0: 3, 1: 0}, {0: 0, 1: 0}]
"""By token, the expert that each of two layers chooses."""
OPTIONS = ReadOptions(shape=shape_of_counts({0: 4, 1: 4}, 9))


def write(path: Path, *requests: list[dict[int, int]]) -> str:
    """Write requests whose first two tokens are a prompt."""
    lines = [
        f"{turn},{int(token >= 2)},{token - 2 if token >= 2 else token},{layer},0,{expert},1,0,9\n"
        for turn, tokens in enumerate(requests)
        for token, chosen in enumerate(tokens)
        for layer, expert in chosen.items()
    ]
    path.write_text(HEADING + "".join(lines))
    return str(path)


def counted(window: int, *requests: list[dict[int, int]]) -> float:
    """Count the same in sets: the mean over layers of the mean over whole windows."""
    shares = []
    for layer in (0, 1):
        windows = [
            {chosen[layer] for chosen in tokens[start : start + window]}
            for tokens in requests
            for start in range(0, len(tokens) - window + 1, window)
        ]
        shares.append(sum(map(len, windows)) / len(windows) / 4)
    return sum(shares) / 2


def test_shares_are_those_of_whole_windows_of_a_request(tmp_path: Path) -> None:
    requests = CHOSEN, CHOSEN[:3]
    found = touched_shares([write(tmp_path / "t.csv", *requests)], OPTIONS)
    assert found == {window: pytest.approx(counted(window, *requests)) for window in (1, 2, 4, 5)}


def test_longer_windows_touch_no_less(tmp_path: Path) -> None:
    found = touched_shares([write(tmp_path / "t.csv", CHOSEN)], OPTIONS)
    assert all(found[one] <= found[two] for one, two in itertools.pairwise((1, 2, 4)))


def test_counts_without_tokens_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("layer,expert,count\n0,0,5\n1,1,7\n")
    with pytest.raises(TraceError, match="no tokens in it"):
        touched_shares([str(tmp_path / "h.csv")], OPTIONS)
