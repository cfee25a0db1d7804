"""How many experts a micro-batch uses: published texts, traces, uniform routers."""

from pathlib import Path

import pytest

from moepack.common.errors import TraceError
from moepack.planning.forecasting.touched import Touched, touched_shares
from moepack.traces.formats.reading import read_trace
from tests.support.shapes import shape_of_counts


@pytest.mark.parametrize(
    ("used", "count", "tokens", "share"),
    [
        (8, 256, 130, 0.40),  # Qwen3.6-35B
        (8, 256, 1658, 0.77),  # the same
        (6, 256, 149, 0.42),  # DeepSeek V4 Flash
        (6, 128, 130, 0.59),  # Qwen3-30B-A3B, by a trace
    ],
)
def test_published_texts_come_out(used: int, count: int, tokens: int, share: float) -> None:
    likely, least, most = Touched(used, count).shares(tokens)
    assert likely == pytest.approx(share, rel=0.2)
    assert least < share < most
    assert most < 1 - (1 - used / count) ** tokens, "a uniform router's"


def test_a_trace_says_it_better_and_beyond_its_end_no_more() -> None:
    shares = {1: 1 / 32, 2: 0.06, 64: 0.3, 128: 0.4}
    traced = Touched(8, 256, shares)
    assert traced.source == "trace"
    for tokens in (64, 128):
        likely, least, most = traced.shares(tokens)
        assert likely == pytest.approx(shares[tokens])
        assert most / least < 1.5
    within, beyond = traced.shares(128), traced.shares(129)
    assert beyond[2] / beyond[0] > 1.05 * within[2] / within[0]
    assert Touched(8, 256).source == "published texts"


HEADING = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
CHOSEN = [{0: 0, 1: 0}, {0: 1, 1: 0}, {0: 1, 1: 2}, {0: 3, 1: 0}, {0: 0, 1: 0}]
"""By token, the expert that each of two layers chooses."""
SHAPE = shape_of_counts({0: 4, 1: 4}, 9)


def write(path: Path, *requests: list[dict[int, int]]) -> str:
    """Write requests with a prompt of two tokens."""
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
    with read_trace(write(tmp_path / "t.csv", *requests), model=SHAPE) as trace:
        shares = touched_shares(trace)
    assert shares == {window: pytest.approx(counted(window, *requests)) for window in (1, 2, 4, 5)}


def test_counts_without_tokens_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("layer,expert,count\n0,0,5\n1,1,7\n")
    with (
        read_trace(tmp_path / "h.csv", model=SHAPE) as trace,
        pytest.raises(TraceError, match="no tokens in it"),
    ):
        touched_shares(trace)
