"""The contents of a pack: families, parts, counts, and the location of each expert.

Pure look-ups in the index: it knows the paths of data files and opens none of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from moepack.common.errors import PackError, RequestError
from moepack.common.shape import ExpertKey
from moepack.common.sizes import Size, is_share, parse_size, ranges_text
from moepack.pack.format.dense import DenseTensor
from moepack.pack.format.index import Index
from moepack.pack.format.names import short_name
from moepack.pack.format.tables import PackedFamily, PartKind
from moepack.pack.reading.locations import (
    BlobLocation,
    ExpertHotness,
    PartLocation,
    PartSpan,
    TensorLocation,
    new_span,
)

if TYPE_CHECKING:
    from moepack.pack.reading.copies import Mirror, Partial

PartNames = dict[str, tuple[PackedFamily, int]]
"""Each name of a part, full and short, with its family and its number there."""


class Catalog:
    """The experts of the pack at `path`, by its index; `file_paths` are the index's files.

    `partial` says which bytes of these are on this machine, None if that is not in question. A
    Catalog may be used from several threads. Offsets count from the start of the file they name.
    """

    def __init__(self, path: Path, index: Index, file_paths: Sequence[Path]) -> None:
        self.path = path
        self.index = index
        self.file_paths = tuple(file_paths)
        self.partial: Partial | None = None
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
        full = {kind.name: (family, number) for number, kind in enumerate(family.part_kinds)}
        short = {short_name(name): place for name, place in reversed(full.items())}
        self._part_names[layer, family.name] = short | full
        of_layer = self._part_names.setdefault((layer, None), {})
        of_layer |= short | full if is_main else full

    def families(self, layer: int) -> tuple[str, ...]:
        """Return the names of the families of experts in `layer`, the main one first."""
        self.packed_family(layer, None)
        return tuple(name for number, name in self._families if number == layer)

    def expert_count(self, layer: int, *, family: str | None = None) -> int:
        """Return how many experts `layer` has in `family` (the layer's main one by default)."""
        return self.packed_family(layer, family).expert_count

    def parts(self, layer: int, *, family: str | None = None) -> tuple[PartKind, ...]:
        """List the parts of one expert of `layer`: name, GGML type, shape, length in bytes."""
        return self.packed_family(layer, family).part_kinds

    @property
    def mirror(self) -> Mirror | None:
        """The mirror of the pack, sound or not; None if it has none."""
        return None

    def path_of(self, file: int, offset: int, length: int) -> Path:
        """Return the path under which a range of file number `file` is read.

        It is that of the file; in a partial pack, of the origin's if the range is not here.
        """
        path = self.file_paths[file]
        return path if self.partial is None else self.partial.path_of(path, offset, length)

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
        """Return the location of an expert's blob, or of one of its parts.

        `part` is a full name (`ffn_up_exps.weight`) of any family, or a short one (`up`, `up.bias`)
        of the layer's main family; if `family` is named, either is looked for there. Raises
        RequestError for an expert or part that the pack does not have, PackError for a record that
        breaks the format.
        """
        if part is not None:
            return self._locate_part(layer, expert, part, family)
        owner = self.packed_family(layer, family)
        offset, length, hotness, rank, file = self._blob(owner, expert)
        if not length:
            problem = (
                f"layer {layer} expert {expert} has no blob: its parts lie apart in the shards"
            )
            name = short_name(owner.part_kinds[0].name)
            hint = f"name one with `part`, such as {name}"
            raise RequestError(problem, path=self.path, hint=hint)
        measured = hotness if owner.hotness_measured else None
        path = self.path_of(file, offset, length)
        return BlobLocation(layer, expert, owner.name, path, offset, length, rank, measured)

    def hotness(self, layer: int, expert: int, *, family: str | None = None) -> ExpertHotness:
        """Return rank, hotness and length of an expert, whether it has a blob or not.

        Raises as `locate`.
        """
        owner = self.packed_family(layer, family)
        _, length, hotness, rank, _ = self._blob(owner, expert)
        measured = hotness if owner.hotness_measured else None
        return ExpertHotness(rank, measured, length or payload_length(owner))

    def _blob(self, family: PackedFamily, expert: int) -> tuple[int, int, int, int, int]:
        if not 0 <= expert < family.expert_count:
            problem = f"layer {family.layer} has no expert {expert} in {family.name}"
            expected = f"0 to {family.expert_count - 1}"
            raise RequestError(problem, path=self.path, expected=expected)
        return self.index.blob(family.first_blob + expert)

    def _locate_part(self, layer: int, expert: int, part: str, name: str | None) -> PartLocation:
        try:
            family, number = self._part_names[layer, name][part]
        except KeyError:
            raise self._no_part(layer, part, name) from None
        blob = self._blob(family, expert)
        kind, index = family.part_kinds[number], self.index
        first = family.first_part + expert * len(family.part_kinds)
        offset, length, digest, file, _ = record = index.part(first + number, kind)
        if blob[1]:
            self._check_inside(layer, expert, kind, record, blob)
        elif not index.files[file].is_shard:
            problem = "a part of an expert without a blob lies in no shard"
            place = f"layer {layer} expert {expert} {kind.name}"
            actual = f"file {file}, which is a data file"
            raise PackError(problem, path=index.path, place=place, found=actual)
        return PartLocation(
            layer,
            expert,
            kind.name,
            self.path_of(file, offset, length),
            offset,
            blob[0] if blob[1] else None,
            length,
            index.files[file].known(digest),
        )

    def _check_inside(
        self,
        layer: int,
        expert: int,
        kind: PartKind,
        record: tuple[int, int, int, int, int],
        blob: tuple[int, int, int, int, int],
    ) -> None:
        """Raise PackError if a part lies outside its blob; both are as in the index."""
        offset, length, _, file, _ = record
        if file == blob[4] and 0 <= offset - blob[0] <= blob[1] - length:
            return
        raise PackError(
            "a part lies outside its blob",
            path=self.index.path,
            place=f"layer {layer} expert {expert} {kind.name}",
            expected=f"file {blob[4]}, bytes {blob[0]:,} to {blob[0] + blob[1]:,}",
            found=f"file {file}, bytes {offset:,} to {offset + length:,}",
        )

    def locate_all(
        self, layer: int, expert: int, *, family: str | None = None
    ) -> tuple[Path, int, int, tuple[PartSpan, ...]] | None:
        """Return file, offset and length of an expert's blob, and the spans of its parts in it.

        None if it has no blob, since its parts lie apart. Raises as `locate`.
        """
        owner = self.packed_family(layer, family)
        offset, length, _, _, file = blob = self._blob(owner, expert)
        if not length:
            return None
        has_digests = self.index.files[file].has_digests
        kinds = owner.part_kinds
        spans = []
        records = self.index.parts(owner.first_part + expert * len(kinds), kinds)
        for kind, record in zip(kinds, records, strict=True):
            part_offset, part_length, digest, part_file, _ = record
            start = part_offset - offset
            if part_file != file or not 0 <= start <= length - part_length:
                self._check_inside(layer, expert, kind, record, blob)
            spans.append(new_span((kind.name, start, kind.length, digest if has_digests else None)))
        return self.path_of(file, offset, length), offset, length, tuple(spans)

    def part_names(self, layer: int, *, family: str | None = None) -> PartNames:
        """Return the names that `locate` takes for a part in `layer`; not to be changed."""
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

        The budget is bytes, or a text: `8GiB`, or `25%` of all experts that may be listed. Counts
        blobs with their padding, or parts that lie apart, as `hotness` does: of each layer's main
        family or of the `family` named, in all layers or in `layers`. Without measured hotness the
        order is the source's. Raises RequestError for an invalid size.
        """
        self.check_open()
        length = self.budget_length(byte_budget, "byte_budget", family=family, layers=layers)
        index = self.index
        is_listed = self._are_listed(family, layers)
        families, first_blobs = index.families, self._first_blobs
        pairs = []
        for rank in range(index.blob_count):
            blob = index.blob_at_rank(rank)
            number = bisect_right(first_blobs, blob) - 1
            if not is_listed[number]:
                continue
            length -= index.blob(blob)[1] or payload_length(families[number])
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
        """Return the bytes of a budget for experts; a share is of all that `hottest` may list.

        Raises RequestError for an invalid size, which names `argument`.
        """
        if not is_share(size):
            return parse_size(size, argument)
        whole = sum(
            self.index.blob(blob)[1] or payload_length(owner)
            for owner, is_listed in zip(
                self.index.families, self._are_listed(family, layers), strict=True
            )
            if is_listed
            for blob in range(owner.first_blob, owner.first_blob + owner.expert_count)
        )
        return parse_size(size, argument, whole=whole)

    def _are_listed(self, family: str | None, layers: Container[int] | None) -> list[bool]:
        """Return for each family whether `hottest` lists its experts."""
        return [
            (self._main_families[owner.layer].name if family is None else family) == owner.name
            and (layers is None or owner.layer in layers)
            for owner in self.index.families
        ]

    def dense(self) -> tuple[TensorLocation, ...]:
        """List the dense tensors, in the order of the source; none if the pack has only experts.

        Raises PackError for a record that breaks the format.
        """
        self.check_open()
        if self._tensors is None:
            self._tensors = {one.name: self._tensor(one) for one in self.index.tensors()}
        return tuple(self._tensors.values())

    def locate_dense(self, name: str) -> TensorLocation:
        """Return the location of a dense tensor; raise RequestError for an unknown name."""
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
            path=self.path_of(tensor.file, tensor.offset, tensor.length),
            offset=tensor.offset,
            length=tensor.length,
            digest=file.known(tensor.digest),
        )

    def check_open(self) -> None:
        """Raise RequestError if the pack was closed."""
        if not self._families:
            raise RequestError("the pack is closed", path=self.path)

    def forget(self) -> None:
        """Forget all experts, since the index will be unmapped; every call raises RequestError."""
        self._families.clear()
        self._main_families.clear()
        self._part_names.clear()

    def packed_family(self, layer: int, name: str | None = None) -> PackedFamily:
        """Return a family of experts of a layer, by default the main one."""
        try:
            return self._main_families[layer] if name is None else self._families[layer, name]
        except KeyError:
            raise self._no_family(layer, name) from None

    def _no_family(self, layer: int, name: str | None) -> RequestError:
        self.check_open()
        problem = f"the pack has no experts in layer {layer}"
        hint = f"it holds layers {ranges_text(self.layers)}"
        if layer in self.layers:
            problem = f"layer {layer} has no family {name}"
            hint = f"it has {', '.join(self.families(layer))}"
        return RequestError(problem, path=self.path, hint=hint)

    def _no_part(self, layer: int, part: str, family: str | None) -> RequestError:
        self.packed_family(layer, family)
        families = self.families(layer) if family is None else (family,)
        names = [kind.name for name in families for kind in self.parts(layer, family=name)]
        where = f"layer {layer}" if family is None else f"{family} of layer {layer}"
        hint = f"it has {', '.join(names)}"
        return RequestError(f"{where} has no part {part}", path=self.path, hint=hint)


def payload_length(family: PackedFamily) -> int:
    """Return the bytes of one expert's parts, without padding."""
    return sum(kind.length for kind in family.part_kinds)
