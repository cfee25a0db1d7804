"""What a server counts, in the text format of Prometheus."""

from collections.abc import Iterator

from moepack.running.engine import MemoryUse
from moepack.running.generation import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS = {
    "requests": "Texts that were made, whole or in part.",
    "failures": "Texts that ended with an error.",
    "prompt_tokens": "Tokens of prompts.",
    "tokens": "Tokens of texts.",
    "prompt_seconds": "Seconds of computing prompts.",
    "decode_seconds": "Seconds of computing tokens one by one.",
    "expert_hits": "Lookups of experts that were in memory.",
    "expert_misses": "Lookups of experts that were read.",
    "read_bytes": "Bytes of experts that were read.",
    "read_seconds": "Seconds of waiting for them.",
    "prefetched": "Experts that were missing, and on their way before they were chosen.",
    "wasted_bytes": "Bytes of experts that were read ahead in vain.",
}


class Metrics:
    """Counts what texts take."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = dict.fromkeys(_COUNTERS, 0)

    def add(self, generation: Generation) -> None:
        """Count a text that has ended, as far as it came."""
        if not generation.has_facts:
            return
        facts = generation.facts
        prompt = facts.prompt
        for name, count in (
            ("requests", 1),
            ("prompt_tokens", facts.prompt_count),
            ("tokens", facts.token_count),
            ("prompt_seconds", prompt.seconds),
            ("decode_seconds", facts.seconds),
            ("expert_hits", facts.hits + prompt.hits),
            ("expert_misses", facts.misses + prompt.misses),
            ("read_bytes", facts.read_length + prompt.read_length),
            ("read_seconds", facts.read_seconds + prompt.read_seconds),
            ("prefetched", facts.prefetched + prompt.prefetched),
            ("wasted_bytes", facts.wasted_length + prompt.wasted_length),
        ):
            self._counts[name] += count

    def add_failure(self) -> None:
        """Count a text that ended with an error."""
        self._counts["failures"] += 1

    def text(self, memory: MemoryUse, waiting_count: int) -> str:
        """Return all of it, and what there is now."""
        return "".join(self._lines(memory, waiting_count))

    def _lines(self, memory: MemoryUse, waiting_count: int) -> Iterator[str]:
        for name, what in _COUNTERS.items():
            yield from _metric(f"{name}_total", "counter", what, self._counts[name])
        for name, value in memory._asdict().items():
            what = f"Bytes of memory for {name}."
            yield from _metric(f"memory_{name}_bytes", "gauge", what, value)
        yield from _metric("waiting", "gauge", "Requests that wait for their turn.", waiting_count)


def _metric(name: str, kind: str, what: str, value: float) -> Iterator[str]:
    yield f"# HELP moepack_{name} {what}\n# TYPE moepack_{name} {kind}\n"
    yield f"moepack_{name} {value!r}\n"  # all digits: what is added to a large sum must show
