"""What a pack holds: families, parts, counts, and where each expert lies.

Pure look-ups in the index: it knows the paths of data files and opens none of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from moepack.errors import RequestError
from moepack.format.dense import DenseTensor
from moepack.format.index import Index
from moepack.format.names import short_name
from moepack.format.tables import PackedFamily, PartKind
from moepack.keys import ExpertKey
from moepack.reading.locations import (
    BlobLocation,
    ExpertHotness,
    PartLocation,
    PartSpan,
    TensorLocation,
    new_span,
)
from moepack.reading.part_faults import part_apart, part_outside
from moepack.sizes import Size, is_share, parse_size, ranges_text

if TYPE_CHECKING:
    from collections.abc import Container

    from moepack.reading.mirror import Mirror
    from moepack.shape import ModelShape

PartNames = dict[str, tuple[PackedFamily, int]]
"""Each name of a part, full and short, with the family it belongs to and its number there."""


class Catalog:
    """The experts of the pack at `path`, by its index; `file_paths` are the files that that lists.

    A Catalog may be used from several threads. Offsets count from the start of the file they name.
    """

    def __init__(self, path: Path, index: Index, file_paths: Sequence[Path]) -> None:
        self.path = path
        self.index = index
        self.file_paths = tuple(file_paths)
        self._families: dict[tuple[int, str], PackedFamily] = {}
        self._main_families: dict[int, PackedFamily] = {}
        # None is for a layer's main family, and the full names of the others.
        self._part_names: dict[tuple[int, str | None], PartNames] = {}
        for family in index.families:
            self._add(family)
        self._tensors: dict[str, TensorLocation] | None = None
        self._first_blobs = [family.first_blob for family in index.families]
        self.layers = tuple(self._main_families)

    def _add(self, family: PackedFamily) -> None:
        layer = family.layer
        is_main = self._main_families.setdefault(layer, family) is family
        self._families[layer, family.name] = family
        names: PartNames = {}
        for number, kind in enumerate(family.part_kinds):
            names.setdefault(short_name(kind.name), (family, number))
        full = {kind.name: (family, number) for number, kind in enumerate(family.part_kinds)}
        self._part_names[layer, family.name] = names | full
        of_layer = self._part_names.setdefault((layer, None), {})
        of_layer |= names | full if is_main else full

    def families(self, layer: int) -> tuple[str, ...]:
        """Return the names of the families of experts in `layer`, the main one first."""
        self._family(layer, None)
        return tuple(name for number, name in self._families if number == layer)

    def expert_count(self, layer: int, *, family: str | None = None) -> int:
        """Return how many experts `layer` has in `family` (the layer's main one by default)."""
        return self._family(layer, family).expert_count

    def parts(self, layer: int, *, family: str | None = None) -> tuple[PartKind, ...]:
        """List what one expert of `layer` consists of: name, GGML type, shape, length in bytes."""
        return self._family(layer, family).part_kinds

    @property
    def mirror(self) -> Mirror | None:
        """The mirror of the pack, sound or not; None where it has none."""
        return None

    @property
    def shape(self) -> ModelShape:
        """The shape of what the pack holds; a length is bytes without padding."""
        from moepack.shape import FamilyShape, ModelShape  # here, since engines do without it

        self.check_open()
        return ModelShape(
            tuple(
                FamilyShape(
                    family.layer,
                    family.name,
                    family.expert_count,
                    _payload_length(family),
                )
                for family in self.index.families
            )
        )

    @overload
    def locate(
        self, layer: int, expert: int, part: None = None, *, family: str | None = None
    ) -> BlobLocation: ...

    @overload
    def locate(
        self, layer: int, expert: int, part: str, *, family: str | None = None
    ) -> PartLocation: ...

    def locate(
        self, layer: int, expert: int, part: str | None = None, *, family: str | None = None
    ) -> BlobLocation | PartLocation:
        """Return where an expert's blob, or one part of it, lies.

        `part` is a full name (`ffn_up_exps.weight`) of any family, or a short one (`up`, `up.bias`)
        of the layer's main family; where `family` is named, either is looked for there. Raises
        RequestError for what the pack does not hold, PackError for a record that breaks the format.
        """
        if part is not None:
            return self._locate_part(layer, expert, part, family)
        owner, blob = self._blob(layer, expert, family)
        offset, length, hotness, rank, file = blob
        if not length:
            raise RequestError(
                f"layer {layer} expert {expert} has no blob: its parts lie apart in the shards",
                path=self.path,
                hint=f"name a part, such as {short_name(owner.part_kinds[0].name)}; reading"
                " takes all of them",
            )
        measured = hotness if owner.hotness_measured else None
        path = self.file_paths[file]
        return BlobLocation(layer, expert, owner.name, path, offset, length, rank, measured)

    def hotness(self, layer: int, expert: int, *, family: str | None = None) -> ExpertHotness:
        """Return rank, hotness and length of an expert, whether it has a blob or not.

        Raises what `locate` raises for an expert that the pack does not hold.
        """
        owner, (_, length, hotness, rank, _) = self._blob(layer, expert, family)
        measured = hotness if owner.hotness_measured else None
        return ExpertHotness(rank, measured, self._length_in_memory(owner, length))

    def _length_in_memory(self, family: PackedFamily, blob_length: int) -> int:
        if blob_length and not self.index.codecs:
            return blob_length
        return max(blob_length, _payload_length(family))

    def _blob(
        self, layer: int, expert: int, family: str | None
    ) -> tuple[PackedFamily, tuple[int, int, int, int, int]]:
        owner = self._family(layer, family)
        if not 0 <= expert < owner.expert_count:
            raise self._no_expert(owner, expert)
        return owner, self.index.blob(owner.first_blob + expert)

    def _locate_part(self, layer: int, expert: int, part: str, name: str | None) -> PartLocation:
        try:
            family, number = self._part_names[layer, name][part]
        except KeyError:
            raise self._no_part(layer, part, name) from None
        if not 0 <= expert < family.expert_count:
            raise self._no_expert(family, expert)
        blob = self.index.blob(family.first_blob + expert)
        kind = family.part_kinds[number]
        first = family.first_part + expert * len(family.part_kinds)
        record = self.index.part(first + number, kind)
        location = self._part(layer, expert, kind, record, blob)
        if self.index.codecs:
            parts = self.index.parts(first, family.part_kinds)
            if any(codec for _, _, _, _, codec in parts):
                return location._replace(blob_offset=None)
        return location

    def locate_all(
        self, layer: int, expert: int, *, family: str | None = None
    ) -> tuple[Path, int, int, tuple[PartSpan, ...]] | None:
        """Return file, offset and length of an expert's blob, and where its parts lie in it.

        None where it has no blob, since its parts lie apart, or where one of them is stored by a
        codec, so that the blob is nothing to read as it lies. Raises what `locate` raises.
        """
        owner = self._family(layer, family)
        if not 0 <= expert < owner.expert_count:
            raise self._no_expert(owner, expert)
        blob = self.index.blob(owner.first_blob + expert)
        offset, length, _, _, file = blob
        if not length:
            return None
        has_digests = self.index.files[file].has_digests
        kinds = owner.part_kinds
        spans = []
        records = self.index.parts(owner.first_part + expert * len(kinds), kinds)
        for kind, (part_offset, stored_length, part_digest, part_file, codec) in zip(
            kinds, records, strict=True
        ):
            start = part_offset - offset
            if codec:
                return None
            if part_file != file or not 0 <= start <= length - stored_length:
                place = (part_file, part_offset, stored_length)
                raise part_outside(self.index.path, (layer, expert, kind), place, blob)
            known = part_digest if has_digests else None
            spans.append(new_span((kind.name, start, kind.length, known)))
        return self.file_paths[file], offset, length, tuple(spans)

    def _part(
        self,
        layer: int,
        expert: int,
        kind: PartKind,
        record: tuple[int, int, int, int, int],
        blob: tuple[int, int, int, int, int],
    ) -> PartLocation:
        offset, stored_length, part_digest, file, codec = record
        blob_offset: int | None = blob[0]
        if not blob[1]:
            blob_offset = None
            if not self.index.files[file].is_shard:
                raise part_apart(self.index.path, (layer, expert, kind), file)
        elif file != blob[4] or not 0 <= offset - blob[0] <= blob[1] - stored_length:
            part = (file, offset, stored_length)
            raise part_outside(self.index.path, (layer, expert, kind), part, blob)
        path, length = self.file_paths[file], kind.length
        return PartLocation(
            layer,
            expert,
            kind.name,
            path,
            offset,
            blob_offset,
            stored_length,
            length,
            part_digest if self.index.files[file].has_digests else None,
            self.index.codecs[codec - 1] if codec else None,
        )

    def part_names(self, layer: int, *, family: str | None = None) -> PartNames:
        """Return what `locate` takes as the name of a part in `layer`; not to be changed."""
        try:
            return self._part_names[layer, family]
        except KeyError:
            raise self._no_family(layer, family) from None

    def hottest(
        self,
        byte_budget: Size,
        *,
        family: str | None = None,
        layers: Container[int] | None = None,
    ) -> list[ExpertKey]:
        """List experts, hottest first, until the next blob would exceed `byte_budget`.

        That is bytes, or a text: `8GiB`, or `25%` of all that may be listed. Counts blobs with
        their padding, or their parts if these are more, as `hotness` does: of each layer's main
        family or of the `family` named, in all layers or in `layers`. Without measured hotness the
        order is the source's. Raises RequestError for what is no size.
        """
        self.check_open()
        length = self.budget_length(byte_budget, "byte_budget", family=family, layers=layers)
        index = self.index
        is_asked = self._are_asked(family, layers)
        families, first_blobs = index.families, self._first_blobs
        pairs = []
        for rank in range(index.blob_count):
            blob = index.blob_at_rank(rank)
            number = bisect_right(first_blobs, blob) - 1
            if not is_asked[number]:
                continue
            length -= self._length_in_memory(families[number], index.blob(blob)[1])
            if length < 0:
                break
            pairs.append((families[number].layer, blob - first_blobs[number]))
        return list(map(ExpertKey._make, pairs))

    def budget_length(
        self,
        size: Size,
        argument: str,
        *,
        family: str | None = None,
        layers: Container[int] | None = None,
    ) -> int:
        """Return the bytes of a budget for experts, of which `25%` is of all that `hottest` lists.

        Raises RequestError for what is no size, which names `argument`.
        """
        if not is_share(size):
            return parse_size(size, argument)
        whole = sum(
            self._length_in_memory(owner, self.index.blob(blob)[1])
            for owner, asked in zip(
                self.index.families, self._are_asked(family, layers), strict=True
            )
            if asked
            for blob in range(owner.first_blob, owner.first_blob + owner.expert_count)
        )
        return parse_size(size, argument, whole=whole)

    def _are_asked(self, family: str | None, layers: Container[int] | None) -> list[bool]:
        """Return of each family whether its experts are those that `hottest` lists."""
        return [
            (self._main_families[owner.layer].name if family is None else family) == owner.name
            and (layers is None or owner.layer in layers)
            for owner in self.index.families
        ]

    def dense(self) -> tuple[TensorLocation, ...]:
        """List the dense tensors, in the order of the source; none of a pack of experts alone.

        Raises PackError for a record that breaks the format.
        """
        self.check_open()
        if self._tensors is None:
            self._tensors = {
                tensor.name: tensor for tensor in map(self._tensor, self.index.tensors())
            }
        return tuple(self._tensors.values())

    def locate_dense(self, name: str) -> TensorLocation:
        """Return where a dense tensor lies; raise RequestError for one that is not there."""
        tensors = self.dense()
        try:
            return (self._tensors or {})[name]
        except KeyError:
            problem = f"the pack has no dense tensor {name}"
            hint = None if tensors else "it holds experts alone: it was packed without the rest"
            raise RequestError(problem, path=self.path, hint=hint) from None

    def _tensor(self, tensor: DenseTensor) -> TensorLocation:
        file = self.index.files[tensor.file]
        return TensorLocation(
            name=tensor.name,
            type_id=tensor.type_id,
            type_name=tensor.type_name,
            shape=tensor.shape,
            path=self.file_paths[tensor.file],
            offset=tensor.offset,
            length=tensor.length,
            digest=tensor.digest if file.has_digests else None,
        )

    def check_open(self) -> None:
        """Raise RequestError where the pack was closed."""
        if not self._families:
            raise RequestError("the pack is closed", path=self.path)

    def forget(self) -> None:
        """Hold nothing any more: the index is about to go, and every call says so from now on."""
        self._families.clear()
        self._main_families.clear()
        self._part_names.clear()

    def _family(self, layer: int, name: str | None) -> PackedFamily:
        try:
            return self._main_families[layer] if name is None else self._families[layer, name]
        except KeyError:
            raise self._no_family(layer, name) from None

    def _no_family(self, layer: int, name: str | None) -> RequestError:
        self.check_open()
        if layer not in self.layers:
            return RequestError(
                f"the pack has no experts in layer {layer}",
                path=self.path,
                hint=f"it holds layers {ranges_text(self.layers)}",
            )
        names = ", ".join(self.families(layer))
        return RequestError(
            f"layer {layer} has no family {name}", path=self.path, hint=f"it has {names}"
        )

    def _no_part(self, layer: int, part: str, family: str | None) -> RequestError:
        self._family(layer, family)
        families = self.families(layer) if family is None else (family,)
        names = [kind.name for name in families for kind in self.parts(layer, family=name)]
        where = f"layer {layer}" if family is None else f"{family} of layer {layer}"
        hint = f"it has {', '.join(names)}"
        return RequestError(f"{where} has no part {part}", path=self.path, hint=hint)

    def _no_expert(self, family: PackedFamily, expert: int) -> RequestError:
        return RequestError(
            f"layer {family.layer} has no expert {expert} in {family.name}",
            path=self.path,
            expected=f"0 to {family.expert_count - 1}",
        )


def _payload_length(family: PackedFamily) -> int:
    """Return the bytes of one expert's parts, without padding."""
    return sum(kind.length for kind in family.part_kinds)
