"""Expert counts from llama.cpp's importance matrices, which are GGUFs since July 2025.

`llama-imatrix` counts, for each expert tensor, how many (token, slot) pairs were routed to each
expert: the F32 tensor `<name>.counts` [1, experts] (tools/imatrix/imatrix.cpp, b11549). It is taken
over a calibration text, in batches: prefill, and not its user's prompts.
"""

import re
import tempfile
from collections.abc import Mapping
from typing import IO

import numpy as np

from moepack.common.errors import MachineError, SourceError, TraceError
from moepack.common.sizes import size_text
from moepack.source import gguf_header
from moepack.source.gguf_header import GgufHeader, Value
from moepack.source.tensor_table import Tensor
from moepack.traces.compressed import TraceStream
from moepack.traces.model import MAX_COUNT, Ints, Items, Origin, Phase, Unknown
from moepack.traces.validation import Checks

_COUNTS = re.compile(r"blk\.(\d{1,5})\.ffn_(?:down|up|gate|gate_up)_exps\.weight\.counts\Z")
_F32 = 0
_ANOTHER_MODEL = "was it made from another model?"
MAX_EXACT = 1 << 24
"""A 32-bit float counts no further."""
MAX_UNPACKED_LENGTH = 1 << 32
"""Of an imatrix that is compressed or comes through a pipe, in bytes."""


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read the counts of an imatrix. Raises TraceError for another GGUF, or a damaged one."""
    if stream.is_plain:
        yield from _read_file(stream.path, stream.name, checks)
        return
    with tempfile.NamedTemporaryFile(prefix="moepack-") as file:
        _unpack(stream, file, checks)
        yield from _read_file(file.name, stream.name, checks)


def _unpack(stream: TraceStream, file: IO[bytes], checks: Checks) -> None:
    """Write a compressed file, or a pipe, to a plain file, to be read in any order."""
    left = MAX_UNPACKED_LENGTH
    try:
        while data := stream.read():
            left -= len(data)
            if left < 0:
                expected = f"up to {size_text(MAX_UNPACKED_LENGTH)}"
                raise checks.error("too long for an imatrix", expected=expected)
            file.write(data)
        file.flush()
    except OSError as error:
        problem = f"cannot be unpacked to {file.name}: {error.strerror}"
        raise MachineError(problem, path=stream.path) from None


def _read_file(path: str, name: str, checks: Checks) -> Items:
    header = _read_header(path, checks)
    tensors: dict[int, list[Tensor]] = {}
    for tensor in header.tensors:
        if match := _COUNTS.match(tensor.name):
            tensors.setdefault(int(match[1]), []).append(tensor)
    if not tensors:
        kind = header.metadata.get("general.type", Value("str", None)).data
        problem = "a GGUF without counts of experts, not a trace"
        expected = "an imatrix of a model with experts"
        raise checks.error(problem, None, expected, f"general.type {kind}")
    counts: dict[int, Ints] = {}
    for layer, of_layer in sorted(tensors.items()):
        counts[layer], *others = (_read_counts(path, tensor, checks) for tensor in of_layer)
        if not all(np.array_equal(counts[layer], other) for other in others):
            raise checks.error("its projections have other counts", f"layer {layer}")
    expert_counts = {layer: len(numbers) for layer, numbers in counts.items()}
    checks.expect_experts(expert_counts, None)
    unknown = frozenset({Unknown.TOKENS, Unknown.REQUESTS})
    yield Origin("imatrix", name, unknown, None, _token_count(header.metadata), expert_counts)
    for layer, numbers in counts.items():
        expert = np.flatnonzero(numbers)
        layers, place = np.full(len(expert), layer, np.int64), f"layer {layer}"
        yield checks.counts(Phase.PREFILL, layers, expert, numbers[expert], lambda _, at=place: at)  # type: ignore[misc]
    # An imatrix has all layers with experts but those for multi-token prediction.
    shape = checks.shape
    if shape is not None and (lacks := shape.without_mtp().expert_counts.keys() - counts.keys()):
        problem, hint = "an imatrix of another model: it lacks a layer", _ANOTHER_MODEL
        raise checks.error(problem, f"layer {min(lacks)}", shape, hint=hint)


def _read_header(path: str, checks: Checks) -> GgufHeader:
    try:
        return gguf_header.read(path)
    except SourceError as error:
        raise TraceError(
            error.problem,
            path=checks.path,
            place=error.place,
            expected=error.expected,
            found=error.found,
            hint=error.hint,
            code=error.code,
        ) from None


def _token_count(metadata: Mapping[str, Value]) -> int | None:
    values = [metadata.get(f"imatrix.chunk_{what}") for what in ("count", "size")]
    numbers = [value.data for value in values if value is not None]
    if len(numbers) < 2 or not all(isinstance(number, int) for number in numbers):
        return None
    count = int(numbers[0]) * int(numbers[1])  # type: ignore[arg-type]
    return count if 0 <= count <= MAX_COUNT else None


def _read_counts(path: str, tensor: Tensor, checks: Checks) -> Ints:
    place = f"tensor {tensor.name!r}"
    if tensor.type_id != _F32:
        raise checks.error("counts that are not F32", place, actual=tensor.type_id)
    try:
        values = np.fromfile(path, "<f4", tensor.length // 4, offset=tensor.offset)
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=checks.path) from None
    with np.errstate(invalid="ignore"):
        wrong = ~((values >= 0) & (values <= MAX_EXACT) & (values == np.floor(values)))
    if wrong.any():
        expert = int(np.argmax(wrong))
        expected = f"a whole number from 0 to {MAX_EXACT}"
        raise checks.error(f"not a count, of expert {expert}", place, expected, values[expert])
    return values.astype(np.int64)
