"""The verdict of the concentration gate: what pinning the most frequent experts is worth.

It follows the split in time: what is pinned today has to be worth something tomorrow. Halves of
every other request say by how much more it would be worth if nothing changed over time.
"""

from typing import NamedTuple

from moepack.simulation.facts import LEAST_SELECTIONS

GATE_PERCENT = 25
"""The verdict looks at what a quarter of the experts is worth: a cache of usual size."""
CLEAR = 0.05
"""Shares that differ by less are called equal."""

_WORDS = {
    "recency": "recency is better than static hotness",
    "static": "static hotness is worth pinning",
    "even": "static hotness is worth nothing here",
}


class Evidence(NamedTuple):
    """What the top quarter of the experts covers of the half that was not learned from.

    `even_share` is what it would with an even router; `met` is how many selections there are an
    expert in the smaller half.
    """

    share: float
    even_share: float
    met: float


def judge(evidence: Evidence | None, latest_share: float | None) -> str:
    """Say in a word what pinning is worth; `latest_share` is an LRU cache's hit rate."""
    if evidence is None:
        return "unknown"
    if evidence.met < LEAST_SELECTIONS:
        return "small"
    if latest_share is not None and latest_share > evidence.share + CLEAR:
        return "recency"
    return "static" if evidence.share > evidence.even_share + CLEAR else "even"


def explain(
    evidence: Evidence | None, interleaved: Evidence | None, latest_share: float | None
) -> str:
    """Give the verdict in a sentence, and say where halves of every other request differ."""
    word = judge(evidence, latest_share)
    if evidence is None:
        return "there are no two halves to compare: only counts are known, or a single token"
    shares = (
        f"the top {GATE_PERCENT} % of each layer's experts, learned on the earlier half, cover "
        f"{evidence.share:.0%} of the selections in the later half; with an even router they would "
        f"cover {evidence.even_share:.0%}"
    )
    if word == "small":
        return (
            f"the sample is too small to say: {evidence.met:.1f} selections an expert in the "
            f"smaller half, at least {LEAST_SELECTIONS} are needed ({shares})"
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
        return f"{text}: what is hot changes over time"
    return f"{text}: even and odd requests are not alike" if more < -CLEAR else text
