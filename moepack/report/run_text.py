"""What running a model took, for people."""

from moepack.programs.run_facts import RunFacts, RunPhase
from moepack.report.values import length_text, rate_text, share_text
from moepack.sizes import count_text, size_text

_ENDS = {
    "stop": "",
    "length": "",
    "context": "; the context is full",
    "left": "; interrupted",
}


def generated(facts: RunFacts) -> str:
    """Return in one line what a text took."""
    words = f"{count_text(facts.token_count, 'token')}, {so_far(facts)}"
    return f"{words}, {size_text(facts.held_length)} of experts in memory{_ENDS[facts.end]}"


def so_far(facts: RunPhase) -> str:
    """Return how fast tokens come, and what is read for them."""
    return (
        f"{rate_text(facts.tokens_per_second)} tok/s, {share_text(facts.hit_rate)} hits, "
        f"{length_text(facts.length_per_token)} a token, {share_text(facts.read_share)} of the "
        f"time waiting for it, drive {length_text(facts.length_per_second)}/s"
    )
