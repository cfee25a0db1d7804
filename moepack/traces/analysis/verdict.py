"""The verdict of the concentration gate: the worth of pinning the most frequent experts.

It follows the split in time: experts pinned today have to be worth it tomorrow. Halves of every
other request tell how much more they would be worth if nothing changed over time.
"""

from typing import NamedTuple

from moepack.traces.simulation.facts import LEAST_SELECTIONS

GATE_PERCENT = 25
"""The verdict is on a quarter of the experts: a cache of usual size."""
CLEAR = 0.05
"""Shares that differ by less are called equal."""

_WORDS = {
    "recency": "recency is better than static hotness",
    "static": "static hotness is worth pinning",
    "even": "static hotness is worth nothing here",
}


class Evidence(NamedTuple):
    """The share of the measured half that the top quarter of the experts covers.

    `uniform_share` is that of a uniform router; `selections_per_expert` are those of the smaller
    half.
    """

    share: float
    uniform_share: float
    selections_per_expert: float


def judge(evidence: Evidence | None, latest_share: float | None) -> str:
    """Return the verdict in a word; `latest_share` is an LRU cache's hit rate."""
    if evidence is None:
        return "unknown"
    if evidence.selections_per_expert < LEAST_SELECTIONS:
        return "small"
    if latest_share is not None and latest_share > evidence.share + CLEAR:
        return "recency"
    return "static" if evidence.share > evidence.uniform_share + CLEAR else "even"


def explain(
    evidence: Evidence | None, interleaved: Evidence | None, latest_share: float | None
) -> str:
    """Return the verdict in a sentence, and whether halves of every other request differ."""
    word = judge(evidence, latest_share)
    if evidence is None:
        return "there are no two halves to compare: only counts are known, or a single token"
    shares = (
        f"the top {GATE_PERCENT} % of each layer's experts, learned on the earlier half, cover "
        f"{evidence.share:.0%} of the selections in the later half; with a uniform router they "
        f"would cover {evidence.uniform_share:.0%}"
    )
    if word == "small":
        return (
            f"the sample is too small: {evidence.selections_per_expert:.1f} selections an "
            f"expert in the smaller half, at least {LEAST_SELECTIONS} are needed ({shares})"
        )
    if latest_share is not None:
        shares += f"; an LRU cache that holds as many has {latest_share:.0%}"
    return f"{_WORDS[word]}: {shares}{_difference(word, evidence, interleaved, latest_share)}"


def _difference(
    word: str, evidence: Evidence, interleaved: Evidence | None, latest_share: float | None
) -> str:
    other = judge(interleaved, latest_share)
    if interleaved is None or other == "small":
        return ""
    more = interleaved.share - evidence.share
    if abs(more) <= CLEAR and other == word:
        return ""
    text = f"; learned on every other request they would cover {interleaved.share:.0%} of the rest"
    if more > CLEAR:
        return f"{text}: hotness changes over time"
    return f"{text}: even and odd requests differ" if more < -CLEAR else text
