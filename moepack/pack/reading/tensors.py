"""Weights as numpy arrays: typed views of the mapped bytes of parts and dense tensors.

It imports numpy, and gguf for values, so it is itself imported with the first array.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import PackError, RequestError
from moepack.pack.reading.expert_read import file_error, short_file
from moepack.storage.regular_file import open_regular

if TYPE_CHECKING:
    from moepack.pack.format.tables import PartKind
    from moepack.pack.reading.locations import PartLocation, TensorLocation

Array = NDArray[Any]

_BF16 = "BF16"
_DTYPES = {
    "F32": "<f4",
    "F16": "<f2",
    _BF16: "<u2",
    "F64": "<f8",
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
"""The numpy types of GGML types; for BF16 that of its bits, the upper half of a float32's."""
_FLOATS = {"F32", "F16", "F64"}


class Mappings:
    """The files of a pack, each mapped when it is first needed. May be used by several threads.

    Arrays hold what they view: a mapping ends with its last array, not when the pack is closed.
    """

    def __init__(self) -> None:
        self._files: dict[Path, mmap.mmap] = {}

    def array(
        self,
        location: PartLocation | TensorLocation,
        kind: PartKind | TensorLocation,
        place: str,
        rows: int,
        dequantize: bool,
    ) -> Array:
        """Return a part or a tensor, which has rows of so many together: see `Pack.tensor`."""
        data = self._bytes_at(location.path, location.offset, location.length, place)
        array = _typed(data, kind.type_name, kind.shape, rows)
        return _values(array, kind.type_id, kind.type_name, place) if dequantize else array

    def _bytes_at(self, path: Path, offset: int, length: int, place: str) -> NDArray[np.uint8]:
        """Return bytes of a file, read-only. Raises PackError for a file that has fewer."""
        if path not in self._files:
            self._files.setdefault(path, _map(path, place))
        mapped = self._files[path]
        if offset + length > len(mapped):
            expected = f"{offset + length:,} bytes or more"
            raise short_file(path, place, expected, f"{len(mapped):,}")
        return np.frombuffer(mapped, np.uint8, length, offset)


def _map(path: Path, place: str) -> mmap.mmap:
    try:
        with open(path, "rb", opener=open_regular) as file:
            if not os.fstat(file.fileno()).st_size:
                raise PackError("the file is empty", path=path, place=place)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise file_error(path, place, error) from None


def _typed(data: NDArray[np.uint8], type_name: str, shape: tuple[int, ...], rows: int) -> Array:
    """Give bytes their type and shape, the slowest axis first."""
    outer = tuple(reversed(shape[1:]))
    columns = shape[0] if shape else 1
    if dtype := _DTYPES.get(type_name):
        return data.view(dtype).reshape(*outer, columns)
    if rows > 1 and outer and outer[-1] % rows == 0:
        outer = (*outer[:-1], outer[-1] // rows)
    count = math.prod(outer)
    if not count or len(data) % count:
        return data
    return data.reshape(*outer, len(data) // count)


def _values(array: Array, type_id: int, type_name: str, place: str) -> NDArray[np.float32]:
    """Return the values as float32, without a copy if they are that already."""
    if type_name in _FLOATS:
        return array.astype(np.float32, copy=False)
    if type_name == _BF16:
        return (array.astype("<u4") << 16).view(np.float32)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values: NDArray[np.float32] = dequantize(array, GGMLQuantizationType(type_id))
    except (ValueError, NotImplementedError):
        problem = f"gguf-py has no values of type {type_name}"
        hint = "without `dequantize` you get its raw bytes"
        raise RequestError(problem, place=place, hint=hint) from None
    return values
