"""Hotness: the selections of each expert, over a number of tokens.

Plain values, so that a packer needs nothing of reading and counting traces.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from moepack.common import digest
from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey, ModelShape


class HeldOut(NamedTuple):
    """The half of the selections that is only measured on, never learned from.

    `by` is the rule that divides the halves: `time` if it is the later one.
    """

    by: str
    token_count: int | None
    counts: Mapping[ExpertKey, int]


class Hotness(NamedTuple):
    """Counts by expert, and their provenance.

    `token_count` and `request_count` are None if unknown. `held_out` is a part of `counts`.
    `origins` describe the traces. `digest` is the file's.
    """

    path: str
    counts: Mapping[ExpertKey, int]
    token_count: int | None
    digest: int
    request_count: int | None = None
    held_out: HeldOut | None = None
    origins: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the provenance as the manifest holds it.

        The manifest is published with the pack: it has nothing about prompts and their files.
        """
        return {
            "digest": digest.to_text(self.digest),
            "token_count": self.token_count,
            "request_count": self.request_count,
            "selection_count": sum(self.counts.values()),
        }

    def learned(self) -> dict[ExpertKey, int]:
        """Return the counts without the held-out part."""
        held_out = self.held_out.counts if self.held_out else {}
        return {key: count - held_out.get(key, 0) for key, count in self.counts.items()}

    def chunk_count(self, layer: int, chunk: int, size: int) -> int:
        """Return how many tokens used a chunk expert that serves `size` experts, at most.

        As if no token had been routed to two of them, but not more than all tokens.
        """
        experts = range(chunk * size, (chunk + 1) * size)
        counts = [self.counts.get(ExpertKey(layer, expert), 0) for expert in experts]
        most = sum(counts) if self.token_count is None else min(sum(counts), self.token_count)
        return max(most, *counts)  # counts may be more than the tokens that a file states

    def check_fits(self, shape: ModelShape) -> None:
        """Raise TraceError if the counts are another model's.

        They are if they name a layer or an expert that the model lacks, or if an origin states
        other layers or numbers of experts.
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
        """Raise TraceError if an origin states other numbers of experts."""
        ours = {str(layer): count for layer, count in expert_counts.items()}
        most = max(expert_counts.values(), default=0)
        for origin in self.origins:
            name = origin.get("model") or "a model without a name"
            theirs = origin.get("expert_counts")
            for layer, count in theirs.items() if isinstance(theirs, dict) else ():
                if ours.get(layer) != count:
                    actual = f"{count} of {name}"
                    raise self._of_another_model(f"layer {layer}", ours.get(layer, 0), actual)
            count = origin.get("expert_count")
            if isinstance(count, int) and count != most:
                raise self._of_another_model(None, most, f"{count} a layer of {name}")

    def _of_another_model(self, place: str | None, ours: int, actual: str) -> TraceError:
        problem, expected = "counted on another model", f"{ours} experts"
        return TraceError(problem, path=self.path, place=place, expected=expected, found=actual)
