"""The one GGUF that some engines read beside the experts: a given file, or one still to be written.

Their formats say where each tensor lies in it. A pack of several shards has no such file: either
the caller names one, made by `export gguf` for instance, or the export writes it as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.pack.engines.gguf_layout import LaidTensor
from moepack.pack.reading.pack import Pack
from moepack.source.shards import open_source
from moepack.storage.extents import Extent

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf\Z")
_HINT = "`moepack export gguf` makes one GGUF of the pack"


class OneGguf(NamedTuple):
    """A GGUF: `header_length` is all bytes before the tensor data; the tensors in file order.

    The inputs of their extents are the files of the pack, or the GGUF itself if it is there.
    """

    path: Path
    length: int
    header_length: int
    tensors: tuple[LaidTensor, ...]


def given_gguf(pack: Pack, path: Path) -> OneGguf:
    """Return a GGUF that the caller names.

    Raises RequestError if it is split or has other tensors than the pack, and the errors of
    `open_source`.
    """
    source = open_source(path)
    if len(source.shards) != 1:
        raise RequestError("a split GGUF: one file is needed", path=path, hint=_HINT)
    shard = source.shards[0]
    tensors = tuple(
        LaidTensor(
            one.name,
            one.type_id,
            one.dims,
            one.length,
            (Extent(one.offset, one.length, 0, one.offset),),
        )
        for one in shard.tensors
    )
    _check(pack, path, tensors)
    return OneGguf(path, shard.file_length, shard.data_offset, tensors)


def gguf_name(pack: Pack) -> str:
    """Return the name of the pack's source as one file."""
    name = pack.manifest.source.shards[0].name
    return _SHARD.sub(".gguf", name) if name.endswith(".gguf") else f"{name}.gguf"


def _check(pack: Pack, path: Path, tensors: tuple[LaidTensor, ...]) -> None:
    """Raise RequestError unless the GGUF has each tensor of the pack, in its type and shape."""
    by_name = {tensor.name: (tensor.type_id, tensor.shape) for tensor in tensors}
    for name, type_id, shape in _expected(pack):
        if by_name.get(name) != (type_id, shape):
            actual = "none of that name" if name not in by_name else "another type or shape"
            raise RequestError(
                "not a GGUF of this model", path=path, place=f"tensor {name}", found=actual
            )


def _expected(pack: Pack) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    for family in pack.index.families:
        for kind in family.part_kinds:
            if kind.origin.first_slice is None:
                shape = (*kind.shape, family.expert_count)
                yield f"blk.{family.layer}.{kind.name}", kind.type_id, shape
    for tensor in pack.index.tensors():
        yield tensor.name, tensor.type_id, tensor.shape
