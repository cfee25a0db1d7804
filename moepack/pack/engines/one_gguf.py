"""The one GGUF that some engines read beside the experts: a given file, or one still to be written.

Their formats say where each tensor lies in it, and state SHA-256. A pack of several shards has no
such file: either the caller names one, made by `export gguf` for instance, or the export writes it
as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import PackError, RequestError, SourceError
from moepack.common.phases import Progress, advancing
from moepack.pack.engines.expert_tensors import ExpertTensor
from moepack.pack.engines.stock_gguf import ALIGNMENT, LaidTensor, lay_out
from moepack.pack.reading.pack import Pack
from moepack.pack.verifying.shard_sha256 import hash_extents
from moepack.source.shards import open_source
from moepack.storage.extents import Extent, NewFile
from moepack.storage.inputs import Inputs
from moepack.storage.thread_pool import run_each

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf\Z")


class OneGguf(NamedTuple):
    """A GGUF: `header_length` is all bytes before the tensor data; the tensors in file order.

    The inputs of its extents are the files of the pack and then its `header`, one piece; or the
    GGUF itself if it is there, and no header.
    """

    path: Path
    file: NewFile
    header_length: int
    tensors: Sequence[LaidTensor]
    header: tuple[bytes, ...] = ()


def gguf_name(pack: Pack) -> str:
    """Return the name of the pack's source as one file."""
    name = pack.manifest.source.shards[0].name
    return _SHARD.sub(".gguf", name) if name.endswith(".gguf") else f"{name}.gguf"


def planned_gguf(pack: Pack, folder: Path) -> OneGguf:
    """Return the GGUF of a pack that is to be written to a folder."""
    layout = lay_out(pack, ALIGNMENT)
    file = layout.file(gguf_name(pack), len(pack.file_paths))
    tensors = (*layout.dense, *layout.experts)
    return OneGguf(folder / file.name, file, len(layout.header), tensors, (layout.header,))


def given_gguf(pack: Pack, path: Path) -> OneGguf:
    """Return a GGUF that the caller names.

    Raises RequestError if it is split or has other tensors than the pack, and the errors of
    `open_source`.
    """
    source = open_source(path)
    if len(source.shards) != 1:
        hint = "`moepack export gguf` makes one GGUF of the pack"
        raise RequestError("a split GGUF: one file is needed", path=path, hint=hint)
    (shard,) = source.shards
    tensors = []
    for one in shard.tensors:
        extent = Extent(one.offset, one.length, 0, one.offset)
        tensors.append(LaidTensor(one.name, one.type_id, one.dims, one.length, (extent,)))
    by_name = {tensor.name: (tensor.type_id, tensor.shape) for tensor in tensors}
    for name, *type_and_shape in _expected(pack):
        if by_name.get(name) != tuple(type_and_shape):
            actual = "none of that name" if name not in by_name else "another type or shape"
            problem, place = "not a GGUF of this model", f"tensor {name}"
            raise RequestError(problem, path=path, place=place, found=actual)
    whole = Extent(0, shard.file_length, 0, 0)
    file = NewFile(path.name, shard.file_length, lambda: (whole,))
    return OneGguf(path, file, shard.data_offset, tensors)


def _expected(pack: Pack) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    for family in pack.index.families:
        for kind in family.part_kinds:
            if kind.origin.first_slice is None:
                shape = (*kind.shape, family.expert_count)
                yield f"blk.{family.layer}.{kind.name}", kind.type_id, shape
    for tensor in pack.index.tensors():
        yield tensor.name, tensor.type_id, tensor.shape


class Hashes(NamedTuple):
    """SHA-256, as hexadecimal digits but for slices.

    `gguf` is that of the GGUF, `header` of all bytes before its tensors, `tensors` of each tensor
    in it, `slices` those of the experts of a tensor in their order.
    """

    gguf: str
    header: str
    tensors: dict[str, str]
    slices: dict[str, tuple[bytes, ...]]


class _Work(NamedTuple):
    """Bytes to hash together: `extents` of `inputs`, with zeros between them up to `length`.

    If they `are_slices`, each has a digest of its own as well.
    """

    inputs: Inputs
    length: int
    extents: Callable[[], Iterable[Extent]]
    are_slices: bool = False


def hash_model(
    pack: Pack,
    experts: Sequence[ExpertTensor],
    gguf: OneGguf,
    threads: int,
    progress: Progress | None,
) -> Hashes:
    """Hash the experts in a pack and the GGUF, each tensor in a thread, and the GGUF in one.

    Raises RequestError if the GGUF has other experts than the pack, and errors for files that
    cannot be read.
    """
    with ExitStack() as stack:
        packed = beside = stack.enter_context(Inputs(pack.file_paths, PackError, gguf.header))
        others = {tensor.name: tensor for tensor in gguf.tensors}
        if not gguf.header:
            beside = stack.enter_context(Inputs([gguf.path], SourceError))
        else:
            for tensor in experts:
                del others[tensor.name]
        header = next(iter(gguf.file.extents()))._replace(length=gguf.header_length)
        work = [
            _Work(beside, gguf.file.length, gguf.file.extents),
            _Work(beside, gguf.header_length, lambda: (header,)),
            *(
                _Work(packed, one.length * one.expert_count, one.extents, are_slices=True)
                for one in experts
            ),
            *(_Work(beside, one.length, one.own_extents) for one in others.values()),
        ]
        advanced = advancing(progress, sum(one.length for one in work))
        (whole, _), (head, _), *hashed = run_each(_hash, work, threads, advanced)
    of_others = hashed[len(experts) :]
    digests = {name: sha256 for name, (sha256, _) in zip(others, of_others, strict=True)}
    slices = {}
    for tensor, (sha256, of_slices) in zip(experts, hashed, strict=False):
        slices[tensor.name] = of_slices
        if digests.setdefault(tensor.name, sha256) != sha256:
            raise RequestError(
                "the GGUF has other bytes than the pack",
                path=gguf.path,
                place=f"tensor {tensor.name}",
                hint="run `moepack verify` on the pack, with this GGUF as its source",
            )
    return Hashes(whole, head, digests, slices)


def file_sha256(path: Path, advanced: Callable[[int], None]) -> str:
    """Compute the SHA-256 of a file; `advanced` is called with the bytes of each piece."""
    with Inputs([path], RequestError) as inputs:
        whole = Extent(0, inputs.length(0), 0, 0)
        return _hash(_Work(inputs, whole.length, lambda: (whole,)), advanced)[0]


def _hash(work: _Work, advanced: Callable[[int], None]) -> tuple[str, tuple[bytes, ...]]:
    """Return the SHA-256 of all, and of each slice."""
    slices: list[bytes] | None = [] if work.are_slices else None
    whole = hash_extents(work.inputs, work.length, work.extents(), advanced, slices)
    return whole, tuple(slices or ())
