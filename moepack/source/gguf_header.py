"""The header of one GGUF file: metadata and the tensor table.

A header is hostile until checked. Every count, length, dimension, offset and product is bounded
before it is used, arrays are walked and not built (a vocabulary of 500,000 strings costs
milliseconds and no memory), and the rules are llama.cpp's (ggml/src/gguf.cpp, b11549) or stricter:
a file that this module accepts has tensors that lie one after the other, without gap or overlap,
inside the file. The format: ggml/docs/gguf.md.
"""

import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from moepack.common import path_hints
from moepack.common.errors import ErrorCode, MachineError, SourceError, open_failure, remedy
from moepack.common.sizes import align
from moepack.source import sniff
from moepack.source.tensor_table import Tensor, TensorEntry, place_tensors
from moepack.storage.input_file import Stamp, open_input
from moepack.storage.regular_file import FileStamp, NotRegularError

# Ten times what the largest models have, and still read within a second and 100 MB.
MAX_TENSORS = 1 << 15
MAX_PAIRS = 1 << 12
MAX_ARRAY_STRINGS = 1 << 21
MAX_NAME_LENGTH = 255
MAX_KEY_LENGTH = 1 << 10
KEPT_STRING_LENGTH = 1 << 10
KEPT_ARRAY_COUNT = 1 << 10
KEPT_ELEMENTS = 1 << 16
MAX_ALIGNMENT = 1 << 30
DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_JOINED_HINT = (
    "shards are not joined by cat: name the first of them, and the others are found; or"
    " `llama-gguf-split --merge FIRST.gguf WHOLE.gguf`"
)
_WINDOW = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
VALUE_TYPE_NAMES = (
    *("u8", "i8", "u16", "i16", "u32", "i32", "f32"),
    *("bool", "str", "arr", "u64", "i64", "f64"),
)


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value and its GGUF type; long strings and arrays are not kept: `data` is None."""

    type_name: str
    data: int | float | str | tuple[int | float, ...] | None


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """One file's header, and the stamp that the file had when it was read.

    `data_offset` is the length of the header with its padding: tensor data begins there. `pairs`
    has the start and end of each metadata pair (key, type and value).
    """

    path: str
    version: int
    alignment: int
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]
    data_offset: int
    stamp: Stamp
    pairs: dict[str, tuple[int, int]]

    @property
    def file_length(self) -> int:
        """The length of the file in bytes."""
        return self.stamp.length

    def value(self, key: str) -> Any:
        """Return the metadata value of `key`, None if it is absent or was not kept."""
        value = self.metadata.get(key)
        return None if value is None else value.data


def read(path: str | os.PathLike[str]) -> GgufHeader:
    """Read the header of the GGUF at `path`.

    Raises SourceError for a file that breaks the format, MachineError if it cannot be opened.
    """
    name = os.fspath(path)
    try:
        file = open_input(path)
    except FileNotFoundError:
        raise missing(name) from None
    except NotRegularError:
        hint = "name a GGUF file or a folder of them"
        raise SourceError("not a file", path=name, hint=hint) from None
    except OSError as error:
        raise open_failure(error, name) from None

    def read_at(length: int, position: int) -> bytes:
        buffer, done = memoryview(bytearray(length)), 0
        while done < length and (count := file.read_into(position + done, buffer[done:])):
            done += count
        return bytes(buffer[:done])

    try:
        return _Parser(name, read_at, file.stamp).parse()
    except OSError as error:
        raise MachineError(
            f"cannot read: {error.strerror}", path=name, hint=remedy(error)
        ) from None
    finally:
        file.close()


def parse(data: bytes | memoryview, path: str, file_length: int) -> GgufHeader:
    """Read a header in memory, of a file of `file_length` bytes; `path` is for messages."""

    def read_at(length: int, position: int) -> bytes:
        return bytes(data[position : position + length])

    return _Parser(path, read_at, FileStamp(0, 0, file_length, 0, 0)).parse()


def missing(path: str) -> SourceError:
    """Return the error for a path without a file; a link to nothing is named as one."""
    if not os.path.islink(path):
        return SourceError("no such file", path=path, hint=path_hints.missing_model_hint(path))
    hint = "a cache or a drive was cleared or moved: download it again, or mend the link"
    return SourceError("a dangling link", path=path, found=os.readlink(path), hint=hint)


class _Parser:
    """Walks a header from its first byte to its last, through a window of the file."""

    def __init__(self, path: str, read_at: Callable[[int, int], bytes], stamp: Stamp) -> None:
        self.path = path
        self.read_at = read_at
        self.stamp = stamp
        self.file_length = stamp.length
        self.window = b""
        self.window_offset = 0
        self.position = 0
        self.array_strings = 0
        self.kept_elements = 0

    def parse(self) -> GgufHeader:
        version, tensor_count, pair_count = self.read_preamble()
        metadata: dict[str, Value] = {}
        pairs: dict[str, tuple[int, int]] = {}
        for number in range(pair_count):
            start = self.position
            key, value = self.read_pair(number)
            if key in metadata:
                self.fail(f"key {key!r}", "stands twice")
            metadata[key] = value
            pairs[key] = (start, self.position)
        alignment = self.alignment(metadata)
        entries = [self.read_tensor_entry(number) for number in range(tensor_count)]
        data_offset = self.position
        if tensor_count:  # llama.cpp does not pad a header without tensors either
            data_offset = align(data_offset, alignment)
        tensors = place_tensors(self.path, entries, data_offset, self.file_length, alignment)
        self.check_end(tensors, data_offset, alignment)
        path, stamp = self.path, self.stamp
        return GgufHeader(path, version, alignment, metadata, tensors, data_offset, stamp, pairs)

    def check_end(self, tensors: Sequence[Tensor], data_offset: int, alignment: int) -> None:
        """Fail if anything follows the last tensor.

        llama.cpp ignores it; here it would take away the second witness of the tensor's length.
        """
        end = tensors[-1].offset + tensors[-1].length if tensors else data_offset
        padded_end = align(end, alignment)
        if self.file_length <= padded_end:
            return
        for at in (end, padded_end):
            if self.read_at(len(_MAGIC), at) == _MAGIC:
                self.fail(f"byte {at:,}", "other files follow the first one", hint=_JOINED_HINT)
        if tensors:
            expected = f"a file of at most {padded_end:,} bytes"
            hint = "compare the file's length with the published one"
            place, actual = f"tensor {tensors[-1].name!r}", f"{self.file_length:,} bytes"
            self.fail(place, "bytes follow the last tensor", expected, actual, hint)

    def fail(
        self,
        place: str,
        problem: str,
        expected: object = None,
        actual: object = None,
        hint: str | None = None,
    ) -> NoReturn:
        path = self.path
        raise SourceError(
            problem, path=path, place=place, expected=expected, found=actual, hint=hint
        )

    def fail_short(self, place: str, problem: str, expected: object, actual: object) -> NoReturn:
        hint = sniff.join_hint(self.path) or "the download did not finish: download it again"
        self.fail(place, problem, expected, actual, hint)

    def next_bytes(self, length: int, place: str) -> bytes:
        start = self.position - self.window_offset
        if not 0 <= start <= start + length <= len(self.window):
            self.window = self.read_at(max(length, _WINDOW), self.position)
            self.window_offset, start = self.position, 0
            if len(self.window) < length:
                place, problem = f"{place} at byte {self.position}", "the header is cut short"
                self.fail_short(place, problem, f"{length} bytes", len(self.window))
        self.position += length
        return self.window[start : start + length]

    def u32(self, place: str) -> int:
        value: int = _U32.unpack(self.next_bytes(4, place))[0]
        return value

    def u64(self, place: str) -> int:
        value: int = _U64.unpack(self.next_bytes(8, place))[0]
        return value

    def read_preamble(self) -> tuple[int, int, int]:
        start = self.read_at(64, 0)
        if start[:4] != _MAGIC:
            description, hint = sniff.describe(self.path, start)
            raise SourceError(
                description,
                path=self.path,
                place="byte 0",
                found=start[:16],
                hint=hint,
                code=ErrorCode.NOT_GGUF,
            )
        self.position = 4
        version = self.u32("version")
        if version and version & 0xFFFF == 0:
            self.fail("version", "a big-endian GGUF: its tensor data is byte-swapped", "2 or 3")
        if version not in (2, 3):
            self.fail("version", "not a version that llama.cpp reads", "2 or 3", version)
        tensor_count = self.bounded("tensor count", MAX_TENSORS, 24)
        pair_count = self.bounded("key-value count", MAX_PAIRS, 13)
        return version, tensor_count, pair_count

    def bounded(self, place: str, limit: int, smallest: int) -> int:
        """Read a count of things that take `smallest` bytes each at least."""
        count = self.u64(place)
        limit = min(limit, (self.file_length - self.position) // smallest)
        if count > limit:
            self.fail_short(place, "out of bounds for this file", f"<= {limit:,}", count)
        return count

    def text(self, place: str, limit: int) -> str:
        at = self.position
        length = self.u64(place)
        if length > limit:
            expected = f"up to {limit:,} bytes"
            self.fail(f"{place} at byte {at}", "too long", expected, f"{length:,} bytes")
        try:
            return self.next_bytes(length, place).decode()
        except UnicodeDecodeError:
            self.fail(f"{place} at byte {at}", "not UTF-8")

    def read_pair(self, number: int) -> tuple[str, Value]:
        key = self.text(f"key {number}", MAX_KEY_LENGTH)
        if not key:
            self.fail(f"key {number}", "an empty key")
        place = f"key {key!r}"
        type_id = self.u32(place)
        if type_id == _ARRAY:
            return key, self.read_array(place)
        if type_id == _STRING:
            return key, Value("str", self.read_string(place))
        if type_id not in _SCALARS:
            self.fail(place, "unknown value type", "0 to 12", type_id)
        form = _SCALARS[type_id]
        (value,) = form.unpack(self.next_bytes(form.size, place))
        return key, Value(VALUE_TYPE_NAMES[type_id], value)

    def read_string(self, place: str) -> str | None:
        length = self.u64(place)
        if length > KEPT_STRING_LENGTH:
            self.skip(length, place)
            return None
        # llama.cpp takes any bytes as a value; a name in Latin-1 is no reason to refuse a model.
        return self.next_bytes(length, place).decode(errors="backslashreplace")

    def read_array(self, place: str) -> Value:
        type_id = self.u32(place)
        count = self.u64(place)
        if type_id == _STRING:
            self.skip_strings(count, place)
            return Value("arr", None)
        if type_id not in _SCALARS:
            problem = "nested arrays are not allowed" if type_id == _ARRAY else "unknown value type"
            self.fail(place, problem, None, f"array of type {type_id}")
        form = _SCALARS[type_id]
        self.check_array(count, form.size, place)
        if count > min(KEPT_ARRAY_COUNT, KEPT_ELEMENTS - self.kept_elements):
            self.skip(count * form.size, place)
            return Value("arr", None)
        self.kept_elements += count
        data = self.next_bytes(count * form.size, place)
        return Value("arr", tuple(item for (item,) in form.iter_unpack(data)))

    def check_array(self, count: int, item_length: int, place: str) -> None:
        limit = (self.file_length - self.position) // item_length
        if count > limit:
            self.fail_short(place, "array longer than the file", f"<= {limit:,}", count)

    def skip(self, length: int, place: str) -> None:
        if length > self.file_length - self.position:
            actual = f"{length:,} bytes from byte {self.position:,}"
            in_all = f"{self.file_length:,} bytes in all"
            self.fail_short(place, "longer than the file", in_all, actual)
        self.position += length

    def skip_strings(self, count: int, place: str) -> None:
        """Walk over `count` strings; this loop is most of the time that a header takes."""
        self.array_strings += count
        self.check_array(count, 8, place)
        if self.array_strings > MAX_ARRAY_STRINGS:
            self.fail(place, "too many strings", f"<= {MAX_ARRAY_STRINGS:,}", self.array_strings)
        length_at = _U64.unpack_from
        while count:
            self.next_bytes(8, place)  # moves the window if it must
            window = self.window
            at = self.position - 8 - self.window_offset
            last = len(window) - 8
            while count and at <= last:
                (length,) = length_at(window, at)
                at += 8 + length
                count -= 1
            self.position = self.window_offset + at
            if self.position > self.file_length:
                in_all = f"{self.file_length} bytes in all"
                self.fail_short(place, "a string is longer than the file", in_all, length)

    def alignment(self, metadata: dict[str, Value]) -> int:
        value = metadata.get("general.alignment")
        if value is None:
            return DEFAULT_ALIGNMENT
        place = "key 'general.alignment'"
        if value.type_name != "u32" or not isinstance(value.data, int):
            self.fail(place, "wrong type", "u32", value.type_name)
        if value.data.bit_count() != 1 or value.data > MAX_ALIGNMENT:
            expected = f"a power of two up to {MAX_ALIGNMENT}"
            self.fail(place, "not an alignment", expected, value.data)
        return value.data

    def read_tensor_entry(self, number: int) -> TensorEntry:
        name = self.text(f"name of tensor {number}", MAX_NAME_LENGTH)
        place = f"tensor {name!r}"
        if not name or "\0" in name or ".." in name.split("/"):
            # llama.cpp takes such names; programs that write a file for each tensor must not.
            self.fail(place, "not a name for a tensor: empty, with NUL, or a path upwards")
        rank = self.u32(place)
        if rank > 4:
            self.fail(place, "too many dimensions", "<= 4", rank)
        dims = struct.unpack(f"<{rank}Q", self.next_bytes(8 * rank, place))
        # A zero among them must not hide a product that overflows in C.
        if math.prod(max(1, dim) for dim in dims) >= 1 << 63:
            self.fail(place, "dimensions out of bounds", "a product below 2^63", dims)
        type_id = self.u32(place)
        return name, dims, type_id, self.u64(place)
