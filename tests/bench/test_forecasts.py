"""The benchmark of forecasts: the traces that it writes, and its rows."""

from pathlib import Path

from benchmarks.forecasts import Comparison, write_trace
from benchmarks.routed import Texts
from benchmarks.routing import made_up_routing, read_routing


def test_the_trace_of_a_text_is_what_it_is_routed_to(tmp_path: Path) -> None:
    routing = made_up_routing(layers=3, experts=16, used=2)
    path = write_trace(tmp_path / "trace.csv", Texts(routing, prompt_count=5, token_count=20))
    written = read_routing(path).tokens
    assert len(written) == 5 + 19, "the last token is not computed"
    assert [set(experts) for experts in written[4]] == [set(one) for one in routing.tokens[4]]
    assert written[3][2] == [], "of a prompt the last layer computes the last token alone"


def test_a_comparison_is_with_the_forecast_and_its_range() -> None:
    rows = list(Comparison(10, 8, 12, 11).rows("small, 12 %", "speed", "tok/s"))
    assert [row.what for row in rows] == ["speed", "speed, at least", "speed, at most"]
    assert [(*row.ours, *row.theirs) for row in rows] == [(11, 10), (11, 8), (11, 12)]
