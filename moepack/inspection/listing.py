"""Every blob and every dense tensor of a pack, row by row: for scripts, and as a pinning list.

Nothing is collected but the keys of the hottest: a pack may have millions of blobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word
from moepack.common.sizes import Size, parse_layers, ranges_text
from moepack.pack.format.tables import PackedFamily
from moepack.pack.opening.open_model import Model, is_pack, open_model
from moepack.pack.reading.catalog import payload_length
from moepack.pack.reading.pack import Pack
from moepack.source.parameters import layer_of


class BlobRow(NamedTuple):
    """One expert: the place of its blob, its rank and hotness.

    `offset` counts from the start of the file at `path`, `length` is bytes with padding; if the
    parts lie apart, as in an index over shards, `path` and `offset` are None and `length` is the
    parts'. `rank` 0 is the hottest of the pack. `hotness` is None if it was not measured.
    """

    layer: int
    expert: int
    family: str
    path: Path | None
    offset: int | None
    length: int
    rank: int
    hotness: int | None

    @property
    def kind(self) -> str:
        """Tells it from the row of a tensor."""
        return "blob"


class TensorRow(NamedTuple):
    """One dense tensor, and its place; `layer` is None if it is of none.

    `shape` is in GGUF order (contiguous axis first), `length` is bytes without padding, `offset`
    counts from the start of the file at `path`.
    """

    layer: int | None
    name: str
    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int

    @property
    def kind(self) -> str:
        """Tells it from the row of a blob."""
        return "tensor"


Row = BlobRow | TensorRow


def list_pack(
    model: Model,
    *,
    hottest: Size | None = None,
    layers: str | Iterable[int] | None = None,
) -> Iterator[Row]:
    """Return the rows of a pack or a GGUF: blobs by expert, then dense tensors.

    With `hottest` they are only the hottest blobs, up to this size (`8GiB`, or `25%` of the
    experts), hottest first, as from `Pack.hottest`. `layers` (numbers, or `0-3,7`) leaves out all
    others, and tensors of no layer. A pack that is opened here stays open until all rows were read.

    Raises RequestError for layers that the pack lacks and for hotness that was not measured,
    PackError for a damaged pack; for a damaged record, at its row.
    """
    chosen = None if layers is None else frozenset(parse_layers(layers))
    pack = model if isinstance(model, Pack) else open_model(model)
    try:
        if chosen is not None:
            _check_layers(pack, chosen)
        length = None
        if hottest is not None:
            _check_measured(pack)
            length = pack.budget_length(hottest, "hottest", layers=chosen)
    except BaseException:
        if pack is not model:
            pack.close()
        raise
    return _rows(pack, length, chosen, closes=pack is not model)


def _check_layers(pack: Pack, layers: frozenset[int]) -> None:
    packed = {*pack.layers, *(layer_of(tensor.name) for tensor in pack.dense())} - {None}
    for layer in sorted(layers - packed):
        hint = f"it holds layers {ranges_text(sorted(one for one in packed if one is not None))}"
        raise RequestError(f"the pack has no layer {layer}", path=pack.path, hint=hint)


def _check_measured(pack: Pack) -> None:
    if any(family.hotness_measured for family in pack.index.families):
        return
    path = shell_word(str(pack.path))
    hint = f"give it one: `moepack rank {path} --hotness FILE`"
    if not is_pack(pack):
        hint = f"pack it by measured hotness: `moepack pack {path} --hotness FILE -o NAME.moepack`"
    raise RequestError("no hotness was measured for it", path=pack.path, hint=hint)


def _rows(
    pack: Pack, hottest: int | None, layers: frozenset[int] | None, *, closes: bool
) -> Iterator[Row]:
    """Yield rows; `hottest` is the length of the blobs to list, None for everything."""
    with pack if closes else nullcontext():
        if hottest is not None:
            for layer, expert in pack.hottest(hottest, layers=layers):
                yield blob_row(pack, pack.packed_family(layer), expert)
            return
        for family in pack.index.families:
            if layers is None or family.layer in layers:
                for expert in range(family.expert_count):
                    yield blob_row(pack, family, expert)
        for tensor in pack.dense():
            number = layer_of(tensor.name)
            if layers is None or number in layers:
                yield TensorRow(
                    layer=number,
                    name=tensor.name,
                    type=tensor.type_name,
                    shape=tensor.shape,
                    path=tensor.path,
                    offset=tensor.offset,
                    length=tensor.length,
                )


def blob_row(pack: Pack, family: PackedFamily, expert: int) -> BlobRow:
    """Return the row of an expert by its record, without the checks of a caller's numbers."""
    offset, length, hotness, rank, file = pack.index.blob(family.first_blob + expert)
    has_blob = bool(length)
    return BlobRow(
        layer=family.layer,
        expert=expert,
        family=family.name,
        path=pack.path_of(file, offset, length) if has_blob else None,
        offset=offset if has_blob else None,
        length=length or payload_length(family),
        rank=rank,
        hotness=hotness if family.hotness_measured else None,
    )
