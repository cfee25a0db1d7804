"""`make soak`: that it runs, and that it notices."""

import pytest

from benchmarks.soak import Findings, Level, judge_levels, soak
from tests.support.needs import needs_llama


@pytest.mark.slow
@needs_llama
def test_a_short_one_finds_nothing() -> None:
    rows = list(soak(1, round_seconds=3))
    assert not [row for row in rows if row.met is False]
    assert {"messages, stream", "left in a stream"} <= {row.what for row in rows}
    (memory,) = (row for row in rows if (row.case, row.what) == ("moepack", "memory"))
    assert len(memory.ours) == 3


@pytest.mark.parametrize("grown", [Level(16 << 20, 0, 0), Level(0, 3, 0), Level(0, 0, 3)])
def test_what_grows_is_noticed_and_noise_is_not(grown: Level) -> None:
    level = Level(100 << 20, 20, 5)
    for share, is_noticed in ((1.0, True), (0.5, False)):
        findings = Findings()
        for number in range(10):
            sums = (a + int(b * share * number / 4) for a, b in zip(level, grown, strict=True))
            findings.levels.append({"server": Level(*sums)})
        (*_, threads) = judge_levels(findings)
        assert len(threads.ours) == 10
        assert bool(findings.problems) is is_noticed


def test_an_answer_that_differs_is_noticed() -> None:
    findings = Findings()
    for text in ("a", "a", "b"):
        findings.add("chat", ("chat", 0), text)
    assert findings.problems == ["chat to prompt 0: 'b' instead of 'a'"]
