"""Every blob and every dense tensor of a pack, row by row: for scripts, and as a pinning list.

Nothing is collected but the keys of the hottest: a pack may have millions of blobs.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from moepack.errors import RequestError
from moepack.escaping import shell_word
from moepack.format.tables import PackedFamily
from moepack.packing.opening import open_model
from moepack.paths import PathOrPaths
from moepack.reading.directory import named_pack
from moepack.reading.locations import TensorLocation
from moepack.reading.pack import Pack
from moepack.sizes import Size, parse_ranges, ranges_text

_LAYER = re.compile(r"blk\.(\d{1,5})\.")


class BlobRow(NamedTuple):
    """One expert: where its blob lies, and how hot it is.

    `offset` counts from the start of the file at `path`, `length` is bytes with padding; where the
    parts lie apart, as in an index over shards, `path` and `offset` are None and `length` is the
    parts'. `rank` 0 is the hottest of the pack. `hotness` is None where it was not measured.
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
        """What it is a row of."""
        return "blob"


class TensorRow(NamedTuple):
    """One dense tensor: what it is, and where it lies; `layer` is None where it is of none.

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
        """What it is a row of."""
        return "tensor"


Row = BlobRow | TensorRow


def list_pack(
    path: PathOrPaths,
    *,
    hottest: Size | None = None,
    layers: str | Iterable[int] | None = None,
) -> Iterator[Row]:
    """Return the rows of a pack, or of a GGUF as it lies: blobs by expert, then dense tensors.

    With `hottest` they are the hottest blobs of up to so many bytes alone (`8GiB`, or `25%` of the
    experts), hottest first, as `Pack.hottest` chooses them. `layers` (numbers, or `0-3,7`) leaves
    out all others, and tensors of no layer. The pack stays open until the rows have come.

    Raises RequestError for layers that the pack does not hold and for hotness that nobody measured,
    PackError for a pack that is damaged; for single records that are, when their row comes.
    """
    chosen = _chosen(layers)
    pack = open_model(path)
    try:
        _check_layers(pack, chosen)
        length = None
        if hottest is not None:
            _check_measured(pack, is_pack=named_pack(path) is not None)
            length = pack.budget_length(hottest, "hottest", layers=chosen)
    except BaseException:
        pack.close()
        raise
    return _rows(pack, length, chosen)


def _chosen(layers: str | Iterable[int] | None) -> frozenset[int] | None:
    if layers is None:
        return None
    if not isinstance(layers, str):
        return frozenset(layers)
    try:
        return frozenset(parse_ranges(layers))
    except ValueError as error:
        raise RequestError(f"not a list of layers: {error}") from None


def _check_layers(pack: Pack, chosen: frozenset[int] | None) -> None:
    if chosen is None:
        return
    of_tensors = (_layer(tensor.name) for tensor in pack.dense())
    held = {*pack.layers, *(layer for layer in of_tensors if layer is not None)}
    for layer in sorted(chosen - held):
        hint = f"it holds layers {ranges_text(sorted(held))}"
        raise RequestError(f"the pack has nothing of layer {layer}", path=pack.path, hint=hint)


def _check_measured(pack: Pack, *, is_pack: bool) -> None:
    if any(family.hotness_measured for family in pack.index.families):
        return
    path = shell_word(str(pack.path))
    hint = f"give it one: `moepack rank {path} --hotness FILE`"
    if not is_pack:
        hint = f"pack it by measured hotness: `moepack pack {path} --hotness FILE -o NAME.moepack`"
    raise RequestError("no hotness was measured for it", path=pack.path, hint=hint)


def _rows(pack: Pack, hottest: int | None, layers: Container[int] | None) -> Iterator[Row]:
    with pack:
        if hottest is not None:
            yield from _hottest(pack, hottest, layers)
            return
        for family in pack.index.families:
            if layers is None or family.layer in layers:
                for expert in range(family.expert_count):
                    yield _blob(pack, family, expert)
        for tensor in pack.dense():
            row = _tensor(tensor)
            if layers is None or row.layer in layers:
                yield row


def _hottest(pack: Pack, length: int, layers: Container[int] | None) -> Iterator[BlobRow]:
    main: dict[int, PackedFamily] = {}
    for family in pack.index.families:
        main.setdefault(family.layer, family)
    for layer, expert in pack.hottest(length, layers=layers):
        yield _blob(pack, main[layer], expert)


def _blob(pack: Pack, family: PackedFamily, expert: int) -> BlobRow:
    """Look a blob up by its record, without the checks of a caller's numbers."""
    offset, length, hotness, rank, file = pack.index.blob(family.first_blob + expert)
    measured = hotness if family.hotness_measured else None
    layer, name = family.layer, family.name
    if not length:
        length = sum(kind.length for kind in family.part_kinds)
        return BlobRow(layer, expert, name, None, None, length, rank, measured)
    path = pack.file_paths[file]
    return BlobRow(layer, expert, name, path, offset, length, rank, measured)


def _tensor(tensor: TensorLocation) -> TensorRow:
    return TensorRow(
        layer=_layer(tensor.name),
        name=tensor.name,
        type=tensor.type_name,
        shape=tensor.shape,
        path=tensor.path,
        offset=tensor.offset,
        length=tensor.length,
    )


def _layer(name: str) -> int | None:
    found = _LAYER.match(name)
    return int(found[1]) if found else None
