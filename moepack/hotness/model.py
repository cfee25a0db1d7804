"""Hotness: how often each expert was chosen, over how many tokens, and what came of judging it.

Plain values: a packer takes them without what reading and counting traces needs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from moepack import digest
from moepack.errors import TraceError
from moepack.keys import ExpertKey
from moepack.shape import ModelShape


class HeldOut(NamedTuple):
    """The half of what was measured that nothing is to be learned from, to judge by.

    `by` says what divides the halves: `time`, where it is the later one.
    """

    by: str
    token_count: int | None
    counts: Mapping[ExpertKey, int]


class Hotness(NamedTuple):
    """Counts by expert, and where they came from.

    `token_count` and `request_count` are None where they are not known. `held_out` is the part of
    `counts` that is held out. `origins` describe the traces. `digest` is the file's.
    `chunk_counts` says how many tokens needed each chunk expert, by layer and its number; it is
    None where only the counts of experts are known, as from a hotness file.
    """

    path: str
    counts: Mapping[ExpertKey, int]
    token_count: int | None
    digest: int
    request_count: int | None = None
    held_out: HeldOut | None = None
    origins: tuple[dict[str, Any], ...] = ()
    chunk_counts: Mapping[ExpertKey, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the provenance as the manifest holds it.

        The manifest is published with the pack: it says nothing of prompts and their files.
        """
        return {
            "digest": digest.to_text(self.digest),
            "token_count": self.token_count,
            "request_count": self.request_count,
            "selection_count": sum(self.counts.values()),
        }

    def learned(self) -> dict[ExpertKey, int]:
        """Return the counts without what is held out."""
        held = self.held_out.counts if self.held_out else {}
        return {key: count - held.get(key, 0) for key, count in self.counts.items()}

    def chunk_count(self, layer: int, chunk: int, size: int) -> int:
        """Return how many tokens needed a chunk expert that serves `size` experts.

        Where that was not counted, the most that it can be is returned: as if no token had chosen
        two of them, but not more than there are tokens.
        """
        if self.chunk_counts is not None:
            return self.chunk_counts.get(ExpertKey(layer, chunk), 0)
        experts = range(chunk * size, (chunk + 1) * size)
        counts = [self.counts.get(ExpertKey(layer, expert), 0) for expert in experts]
        most = sum(counts) if self.token_count is None else min(sum(counts), self.token_count)
        return max(most, *counts)  # counts may have weights, tokens have none

    def check_fits(self, shape: ModelShape) -> None:
        """Raise TraceError where the counts are another model's.

        They are where they name a layer or an expert that the model has not, or were taken on a
        model with other layers or numbers of experts.
        """
        expert_counts = shape.expert_counts
        self._check_origins(expert_counts)
        for layer, expert in sorted(self.counts):
            if expert >= expert_counts.get(layer, 0):
                has_layer = layer in expert_counts
                raise TraceError(
                    f"the model has no {'such expert' if has_layer else 'experts there'}",
                    path=self.path,
                    place=f"layer {layer}, expert {expert}" if has_layer else f"layer {layer}",
                    expected=shape,
                    hint="was it counted on another model?",
                )

    def _check_origins(self, expert_counts: Mapping[int, int]) -> None:
        """Raise TraceError where an origin states other numbers of experts, as far as any does."""
        ours = {str(layer): count for layer, count in expert_counts.items()}
        most = max(expert_counts.values(), default=0)
        for origin in self.origins:
            name = origin.get("model") or "a model without a name"
            stated = origin.get("expert_counts")
            for layer, count in stated.items() if isinstance(stated, dict) else ():
                if ours.get(layer) != count:
                    place, found = f"layer {layer}", f"{count} of {name}"
                    raise self._of_another_model(place, ours.get(layer, 0), found)
            count = origin.get("expert_count")
            if isinstance(count, int) and count != most:
                raise self._of_another_model(None, most, f"{count} a layer of {name}")

    def _of_another_model(self, place: str | None, ours: int, found: str) -> TraceError:
        problem, expected = "counted on another model", f"{ours} experts"
        return TraceError(problem, path=self.path, place=place, expected=expected, found=found)
