"""SHA-256 of a model's tensors and slices, and of the one GGUF, for formats that state them.

A tensor's digest runs over all of it, so that threads share the tensors; the GGUF's own takes one
thread from start to end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import PackError, RequestError, SourceError
from moepack.common.phases import Progress, advancing
from moepack.pack.engines.expert_tensors import RoutedTensor
from moepack.pack.engines.gguf_layout import GgufLayout, LaidTensor
from moepack.pack.engines.one_gguf import OneGguf
from moepack.pack.engines.stock_gguf import gguf_file
from moepack.pack.reading.pack import Pack
from moepack.storage.copying import read_extent
from moepack.storage.extents import Extent
from moepack.storage.inputs import Inputs
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import run_each

_PIECE_LENGTH = 1 << 20


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


class _Hashed(NamedTuple):
    whole: str
    slices: tuple[bytes, ...]


def hash_model(
    pack: Pack,
    experts: Sequence[RoutedTensor],
    gguf: OneGguf,
    layout: GgufLayout | None,
    threads: int,
    progress: Progress | None,
) -> Hashes:
    """Hash the experts in a pack, and the GGUF: a file, or the pack laid out as `layout`.

    Raises RequestError if a file has other experts than the pack, and errors for files that cannot
    be read.
    """
    ours = {tensor.name for tensor in experts}
    with ExitStack() as stack:
        data = () if layout is None else (layout.header,)
        packed = stack.enter_context(Inputs(pack.file_paths, PackError, data))
        if layout is None:
            source = stack.enter_context(Inputs([gguf.path], SourceError))
            work = [_range(source, 0, gguf.length), _range(source, 0, gguf.header_length)]
            others = {one.name: _laid(source, one) for one in gguf.tensors}
        else:
            whole_file = gguf_file(gguf.path.name, layout, len(pack.file_paths))
            header = next(iter(whole_file.extents()))
            work = [
                _Work(packed, whole_file.length, whole_file.extents),
                _Work(packed, header.length, lambda: (header,)),
            ]
            others = {one.name: _laid(packed, one) for one in gguf.tensors if one.name not in ours}
        work += [*(_experts(tensor, packed) for tensor in experts), *others.values()]
        advanced = advancing(progress, sum(one.length for one in work))
        whole, head, *hashed = run_each(_hash, work, threads, advanced)
    of_experts, of_others = hashed[: len(experts)], hashed[len(experts) :]
    digests = {name: one.whole for name, one in zip(others, of_others, strict=True)}
    slices = {}
    for tensor, one in zip(experts, of_experts, strict=True):
        slices[tensor.name] = one.slices
        if digests.setdefault(tensor.name, one.whole) != one.whole:
            raise RequestError(
                "the GGUF has other bytes than the pack",
                path=gguf.path,
                place=f"tensor {tensor.name}",
                hint="run `moepack verify` on the pack, with this GGUF as its source",
            )
    return Hashes(whole.whole, head.whole, digests, slices)


def file_sha256(path: Path, advanced: Callable[[int], None]) -> str:
    """Compute the SHA-256 of a file; `advanced` is called with the bytes of each piece."""
    computed = hashlib.sha256()
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        while piece := file.read(_PIECE_LENGTH):
            computed.update(piece)
            advanced(len(piece))
    return computed.hexdigest()


def _range(inputs: Inputs, offset: int, length: int) -> _Work:
    return _Work(inputs, length, lambda: (Extent(0, length, 0, offset),))


def _laid(packed: Inputs, tensor: LaidTensor) -> _Work:
    extents = [one._replace(offset=one.offset - tensor.offset) for one in tensor.extents]
    return _Work(packed, tensor.length, lambda: extents)


def _experts(tensor: RoutedTensor, packed: Inputs) -> _Work:
    def extents() -> Iterable[Extent]:
        return (tensor.extent(n, n * tensor.length) for n in range(tensor.expert_count))

    return _Work(packed, tensor.length * tensor.expert_count, extents, are_slices=True)


def _hash(work: _Work, advanced: Callable[[int], None]) -> _Hashed:
    whole, slices, position = hashlib.sha256(), [], 0
    buffer = memoryview(bytearray(_PIECE_LENGTH))
    for extent in work.extents():
        whole.update(bytes(extent.offset - position))
        own = hashlib.sha256()
        for piece in read_extent(work.inputs, extent, lambda left: buffer[:left]):
            whole.update(piece)
            if work.are_slices:
                own.update(piece)
            advanced(len(piece))
        slices.append(own.digest())
        position = extent.end
    whole.update(bytes(work.length - position))
    return _Hashed(whole.hexdigest(), tuple(slices) if work.are_slices else ())
