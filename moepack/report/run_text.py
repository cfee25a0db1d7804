"""What running a model took, for people."""

from moepack.report.values import UNKNOWN, length_text, share_text
from moepack.running.engine import MemoryUse
from moepack.running.generation import GenerationFacts, PhaseFacts
from moepack.sizes import count_text, size_text

_ENDS = {
    "stop": "",
    "length": "",
    "context": "; the context is full",
    "left": "; interrupted",
}


def memory(use: MemoryUse) -> str:
    """Say in one line what the memory is for."""
    total = use.dense + use.context + use.experts + use.reserve
    reserve = f", {size_text(use.reserve)} in reserve" if use.reserve else ""
    pinned = f", {size_text(use.pinned)} of them pinned" if use.pinned else ""
    return (
        f"memory: {size_text(total)}: {size_text(use.dense)} dense, {size_text(use.context)} "
        f"context, {size_text(use.experts)} for experts{pinned}{reserve}"
    )


def generated(facts: GenerationFacts) -> str:
    """Say in one line what a text took."""
    length = facts.memory.dense + facts.memory.context + facts.held_length
    words = f"{count_text(facts.token_count, 'token')}, {so_far(facts)}"
    return f"{words}, {size_text(length)} in memory{_ENDS[facts.end]}"


def so_far(facts: PhaseFacts) -> str:
    """Say how fast tokens come, and what is read for them."""
    return (
        f"{_number(facts.tokens_per_second)} tok/s, {share_text(facts.hit_rate)} hits, "
        f"{length_text(facts.length_per_token)} a token, {share_text(facts.read_share)} of the "
        f"time waiting for it, drive {length_text(facts.length_per_second)}/s"
    )


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"
