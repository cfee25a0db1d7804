"""What running a model took, for people."""

from moepack.programs.run_facts import RunFacts, RunPhase
from moepack.report.values import UNKNOWN, length_text, rate_text, share_text, speed_text
from moepack.sizes import count_text, size_text

_ENDS = {
    "stop": "",
    "length": "",
    "context": "; the context is full",
    "left": "; interrupted",
}


def generated(facts: RunFacts) -> str:
    """Return in two lines what a prompt and its answer took."""
    kept = f", {facts.kept_count:,} of them kept" if facts.kept_count else ""
    first = facts.first_token_seconds
    after = UNKNOWN if first is None else f"{first:.2f} s" if first < 10 else f"{first:,.0f} s"
    return (
        f"prompt: {count_text(facts.prompt_count, 'token')}{kept}, "
        f"{rate_text(facts.prompt.tokens_per_second)} tok/s, first token after {after}\n"
        f"answer: {count_text(facts.token_count, 'token')}, {so_far(facts)}, "
        f"{size_text(facts.held_length)} of experts in memory; seed {facts.seed}{_ENDS[facts.end]}"
    )


def so_far(facts: RunPhase) -> str:
    """Return how fast tokens come, and what is read for them."""
    speed = f"{rate_text(facts.tokens_per_second)} tok/s, {share_text(facts.hit_rate)} hits"
    if not facts.read_length:
        return f"{speed}, nothing read"
    return (
        f"{speed}, {length_text(facts.length_per_token)} read a token, "
        f"{share_text(facts.read_share)} of the time waiting for the drive "
        f"({speed_text(facts.length_per_second)})"
    )
