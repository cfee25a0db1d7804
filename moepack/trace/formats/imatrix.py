"""Expert counts from llama.cpp's importance matrices, which are GGUFs since July 2025.

`llama-imatrix` counts, for each expert tensor, how many (token, slot) pairs were routed to each
expert: the F32 tensor `<name>.counts` [1, experts] (tools/imatrix/imatrix.cpp, b11549). It is taken
over a calibration text, in batches: prefill, and not its user's prompts. The older format (`.dat`)
divides the counts out and is refused.
"""

import re
import struct
import tempfile
from collections.abc import Iterable, Mapping
from typing import IO

import numpy as np

from moepack.errors import MachineError, MoepackError, SourceError, TraceError
from moepack.sizes import size_text
from moepack.source import gguf_header
from moepack.source.gguf_header import GgufHeader, Value
from moepack.source.tensor_table import Tensor
from moepack.trace.compressed import TraceStream
from moepack.trace.model import MAX_COUNT, Ints, Items, Origin, Phase, Unknown
from moepack.trace.validation import Checks

_COUNTS = re.compile(r"blk\.(\d{1,5})\.ffn_(down|up|gate|gate_up)_exps\.weight\.counts\Z")
_PREFERRED = ("down", "up", "gate", "gate_up")
_F32 = 0
_ANOTHER_MODEL = "was it made from another model?"
MAX_EXACT = 1 << 24
"""A 32-bit float counts no further."""
MAX_UNPACKED_LENGTH = 1 << 32
"""Of an imatrix that is compressed or comes through a pipe, in bytes."""


def is_legacy(head: bytes) -> bool:
    """Say whether a file begins like an imatrix of the old format: a count, a length, a name."""
    if len(head) < 12:
        return False
    count, length = struct.unpack_from("<ii", head)
    name = head[8 : 8 + max(0, min(length, 64))]
    is_name = re.match(rb"blk\.\d+\.|output|token_embd", name) is not None
    return 0 < count < 1 << 20 and 0 < length < 256 and is_name


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read the counts of an imatrix. Raises TraceError for a GGUF that is none, or is damaged."""
    if is_legacy(stream.peek(1 << 10)):
        problem = "an imatrix of the old format: it has no counts of experts"
        hint = "run llama-imatrix of July 2025 or later, which writes a GGUF"
        raise TraceError(problem, path=stream.path, hint=hint)
    if stream.is_plain:
        yield from _read_file(stream.path, stream.name, checks)
        return
    with tempfile.NamedTemporaryFile(prefix="moepack-") as file:
        _unpack(stream, file)
        try:
            yield from _read_file(file.name, stream.name, checks)
        except MoepackError as error:
            error.path = stream.path
            raise


def _unpack(stream: TraceStream, file: IO[bytes]) -> None:
    """Write what is compressed or comes through a pipe to a file, to be read in any order."""
    left = MAX_UNPACKED_LENGTH
    try:
        while data := stream.read():
            left -= len(data)
            if left < 0:
                expected = f"up to {size_text(MAX_UNPACKED_LENGTH)}"
                raise TraceError("too long for an imatrix", path=stream.path, expected=expected)
            file.write(data)
        file.flush()
    except OSError as error:
        problem = f"cannot be unpacked to {file.name}: {error.strerror}"
        raise MachineError(problem, path=stream.path) from None


def _read_file(path: str, name: str, checks: Checks) -> Items:
    header = _read_header(path)
    tensors = _by_layer(header)
    if not tensors:
        kind = header.metadata.get("general.type", Value("str", None)).data
        raise TraceError(
            "a GGUF without counts of experts, not a trace",
            path=path,
            expected="an imatrix of a model with experts",
            found=f"general.type {kind}",
        )
    counts = {
        layer: _layer_counts(path, layer, by_projection)
        for layer, by_projection in sorted(tensors.items())
    }
    expert_counts = {layer: len(of_layer) for layer, of_layer in counts.items()}
    checks.expect_experts(expert_counts, None)
    unknown = frozenset({Unknown.TOKENS, Unknown.REQUESTS})
    yield Origin("imatrix", name, unknown, None, _token_count(header.metadata), expert_counts)
    for layer, of_layer in counts.items():
        expert = np.flatnonzero(of_layer)
        layers, place = np.full(len(expert), layer, np.int64), f"layer {layer}"
        yield checks.counts(Phase.PREFILL, layers, expert, of_layer[expert], lambda _, at=place: at)  # type: ignore[misc]
    _check_layers(path, tensors, checks)


def _check_layers(path: str, layers: Iterable[int], checks: Checks) -> None:
    """Raise TraceError where layers of the model lack: an imatrix has all of them, chosen or not.

    But for multi-token prediction, which llama.cpp leaves out.
    """
    if checks.shape is None:
        return
    lacks = sorted(checks.shape.without_mtp().expert_counts.keys() - set(layers))
    if lacks:
        raise TraceError(
            "an imatrix of another model: it lacks a layer",
            path=path,
            place=f"layer {lacks[0]}",
            expected=checks.shape,
            hint=_ANOTHER_MODEL,
        )


def _read_header(path: str) -> GgufHeader:
    try:
        return gguf_header.read(path)
    except SourceError as error:
        raise TraceError(
            error.problem,
            path=path,
            place=error.place,
            expected=error.expected,
            found=error.found,
            hint=error.hint,
        ) from None


def _by_layer(header: GgufHeader) -> dict[int, dict[str, Tensor]]:
    by_layer: dict[int, dict[str, Tensor]] = {}
    for tensor in header.tensors:
        match = _COUNTS.match(tensor.name)
        if match:
            by_layer.setdefault(int(match[1]), {})[match[2]] = tensor
    return by_layer


def _token_count(metadata: Mapping[str, Value]) -> int | None:
    values = [metadata.get(f"imatrix.chunk_{what}") for what in ("count", "size")]
    numbers = [value.data for value in values if value is not None]
    if len(numbers) < 2 or not all(isinstance(number, int) for number in numbers):
        return None
    count = int(numbers[0]) * int(numbers[1])  # type: ignore[arg-type]
    return count if 0 <= count <= MAX_COUNT else None


def _layer_counts(path: str, layer: int, tensors: Mapping[str, Tensor]) -> Ints:
    """Read one layer's counts, which are the same for all of its projections."""
    first: Ints | None = None
    for name in _PREFERRED:
        if name not in tensors:
            continue
        counts = _read_counts(path, tensors[name])
        if first is None:
            first = counts
        elif not np.array_equal(first, counts):
            place = f"layer {layer}"
            raise TraceError("its projections have other counts", path=path, place=place)
    assert first is not None, "a layer has a tensor"
    return first


def _read_counts(path: str, tensor: Tensor) -> Ints:
    place = f"tensor {tensor.name!r}"
    if tensor.type_id != _F32:
        raise TraceError("counts that are not F32", path=path, place=place, found=tensor.type_id)
    try:
        values = np.fromfile(path, "<f4", tensor.length // 4, offset=tensor.offset)
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=path) from None
    with np.errstate(invalid="ignore"):
        wrong = ~((values >= 0) & (values <= MAX_EXACT) & (values == np.floor(values)))
    if wrong.any():
        expert = int(np.argmax(wrong))
        expected = f"a whole number from 0 to {MAX_EXACT}"
        raise TraceError(
            f"not a count, of expert {expert}",
            path=path,
            place=place,
            expected=expected,
            found=values[expert],
        )
    return values.astype(np.int64)
