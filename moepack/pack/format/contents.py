"""The contents of an index before it is written: blobs by rank, their parts, dense tensors.

A million blobs must fit, so a blob is two numbers here; parts, offsets inside the blob and length
are the same for all experts of a family, and stand once, in its template.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.pack.format import records, sections
from moepack.pack.format.names import projection
from moepack.source.dense import Dense
from moepack.source.experts import Experts, SourceFamily, SourcePart

PROJECTIONS = ("gate_up", "gate", "up", "down", "attn_v")
"""The projections, in the order that most engines compute them."""
_SUFFIXES = ("weight", "bias", "scale", "input_scale")


@dataclass(frozen=True, slots=True)
class Template:
    """The experts of one family: their parts in order, and the place of each part in a blob.

    `length` is that of a blob with its padding. Without blobs it is 0, and there are no offsets.
    """

    family: SourceFamily
    parts: tuple[SourcePart, ...]
    first_blob: int
    first_part: int
    offsets_in_blob: tuple[int, ...] = ()
    length: int = 0
    hotness_measured: bool = False


class BlobKey(NamedTuple):
    """A blob by the number of its template and its expert there."""

    template: int
    expert: int


@dataclass(frozen=True, slots=True)
class IndexContents:
    """All that an index lists but for positions in files.

    `alignments` are the multiples at which blobs, weights in them and dense tensors begin, in
    bytes. `order` holds all blobs, the hottest first, and `counts` how often routers selected those
    that were measured. `dense` is None if there are experts alone.
    """

    alignments: tuple[int, int, int]
    templates: tuple[Template, ...]
    order: tuple[BlobKey, ...]
    counts: Mapping[BlobKey, int]
    dense: Dense | None

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        """The layers of the experts, ascending."""
        return tuple(sorted({template.family.layer for template in self.templates}))

    @property
    def expert_length(self) -> int:
        """The bytes of all parts, without padding."""
        return sum(
            part.length * template.family.expert_count
            for template in self.templates
            for part in template.parts
        )

    @property
    def dense_length(self) -> int | None:
        """The bytes of all dense tensors, without padding; None if they are left out."""
        if self.dense is None:
            return None
        return sum(tensor.length for _, tensor in self.dense.tensors)

    def directory(self, file_count: int) -> sections.Directory:
        """Return the positions of the sections of the index of `file_count` files."""
        kinds = [part for template in self.templates for part in template.parts]
        counts = {
            "files": file_count,
            "families": len(self.templates),
            "part_kinds": len(kinds),
            "blobs": len(self.order),
            "parts": sum(len(t.parts) * t.family.expert_count for t in self.templates),
            "ranks": len(self.order),
        }
        places = [part.places for part in kinds if not part.stride]
        if places:
            counts["slices"] = sum(map(len, places))
        if self.dense is not None:
            counts["tensors"] = len(self.dense.tensors)
            counts["shard_bytes"] = len(self.dense.other_ranges)
        return sections.place(counts)

    def check_limits(self, file_count: int) -> None:
        """Raise RequestError if the index would be beyond the limits of the format."""
        directory = self.directory(file_count)
        limits = [
            ("layers", self.layers_with_experts[-1] + 1, records.MAX_LAYERS),
            ("bytes of index", directory.index_length, records.MAX_INDEX_LENGTH),
        ]
        for name, section in directory.sections.items():
            limits.append((name.replace("_", " "), section.record_count, records.COUNTS[name][1]))
        for name, count, limit in limits:
            if count > limit:
                raise RequestError(
                    f"the pack would have too many {name}", expected=limit, found=count
                )


def list_templates(
    families: Sequence[SourceFamily], projections: Sequence[str] = PROJECTIONS
) -> Iterator[Template]:
    """Yield the template of each family, without blobs: its parts in the order of `projections`.

    Weights come before biases and scales.
    """

    def order(part: SourcePart) -> tuple[bool, int, int]:
        suffix = part.name.partition(".")[2]
        place = projections.index(projection(part.name))
        return not part.is_weight, place, _SUFFIXES.index(suffix)

    blob = part = 0
    for family in families:
        parts = tuple(sorted(family.parts, key=order))
        yield Template(family, parts, blob, part)
        blob += family.expert_count
        part += family.expert_count * len(parts)


def in_source_order(templates: Sequence[Template]) -> list[BlobKey]:
    """List all blobs in the order of the source."""
    return [
        BlobKey(number, expert)
        for number, template in enumerate(templates)
        for expert in range(template.family.expert_count)
    ]


def as_they_lie(experts: Experts, dense: Dense) -> IndexContents:
    """Return the contents of an index over the shards themselves, in the order of the source."""
    templates = tuple(list_templates(experts.families))
    return IndexContents((1, 1, 1), templates, tuple(in_source_order(templates)), {}, dense)
