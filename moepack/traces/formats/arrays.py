"""Traces as arrays of numbers, in .npy, .npz or JSON: vLLM's and SGLang's.

By the name of an array, its axes are

`routed_experts`, `prompt_routed_experts` (vLLM): tokens, layers with experts, experts used; decode
and prefill of one request.
`topk_ids_of_layer` (SGLang): layers, tokens, experts used.
`logical_count` (SGLang): steps, layers, experts; the values are counts. Beside arrays of tokens it
counts their selections again, and is left out: tokens say more.
any other name, or none: tokens, layers, experts used; one request.

Experts are padded with -1.
"""

import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.common.sizes import size_text
from moepack.traces.compressed import TraceStream
from moepack.traces.expert_places import MAX_PLACES
from moepack.traces.model import (
    MAX_COUNT,
    MAX_NUMBER,
    Dimensions,
    Ints,
    Items,
    Origin,
    Phase,
    Piece,
    Tokens,
    Unknown,
    changes,
)
from moepack.traces.validation import Checks, shorts

MAX_LENGTH = 1 << 30
"""Of a file that is not a plain .npy, and of all arrays in it together, in bytes."""
MAX_JSON_LENGTH = 1 << 27
"""Of JSON, in bytes: its Python objects may take twenty times as much."""
CONVERTER = (
    "convert it where it came from: `import numpy, torch; "
    'found = torch.load("FILE.pt", weights_only=False); '
    'numpy.savez("trace.npz", **{k: numpy.asarray(v) for k, v in found.items() '
    "if torch.is_tensor(v)})`, and for per-pass records save each record's topk_ids_of_layer"
)
_PIECE_SELECTIONS = 1 << 18
_HEADER_LENGTH = 1 << 16
_PHASES = {"routed_experts": Phase.DECODE, "prompt_routed_experts": Phase.PREFILL}
_COUNTED = "logical_count"
_PASSES = {"topk_ids_of_layer", _COUNTED}
_NAMES = ("prompt_routed_experts", "routed_experts", "topk_ids_of_layer", _COUNTED)
_LISTS = ("records", "requests")
_ANSWERS = ("choices", "outputs")
"""Keys of a request's answers in vLLM: in its server's responses, and in its Python objects."""
_BAD_ARRAYS = (ValueError, OverflowError, MemoryError, EOFError, OSError, SyntaxError, TokenError)
"""Numpy's errors for bad arrays."""

Array = NDArray[Any]
Named = tuple[str, Array]


def read_npy(stream: TraceStream, checks: Checks) -> Items:
    """Read one array without a name."""
    yield from _read_all(stream, checks, [[("", _load(stream, checks))]])


def read_npz(stream: TraceStream, checks: Checks) -> Items:
    """Read the arrays of an archive; vLLM's two names together are one request."""
    data = io.BytesIO(_whole(stream, checks, MAX_LENGTH))
    try:
        with zipfile.ZipFile(data) as archive:
            members = archive.infolist()
        if any(not member.filename.endswith(".npy") for member in members):
            raise checks.error("not an archive of arrays", hint=CONVERTER)
        if sum(member.file_size for member in members) > MAX_LENGTH:
            raise _too_long(checks, MAX_LENGTH)
        data.seek(0)
        with np.load(data, allow_pickle=False) as archive:
            named = [(name, archive[name]) for name in archive.files]
        for name, array in named:
            if not isinstance(array, np.ndarray):  # numpy gives the bytes of other members
                raise ValueError(f"{name} is no array")
    except (zipfile.BadZipFile, zlib.error, RuntimeError, *_BAD_ARRAYS) as error:
        raise _unreadable(checks, error) from None
    named.sort(key=lambda pair: _NAMES.index(pair[0]) if pair[0] in _NAMES else len(_NAMES))
    yield from _read_all(stream, checks, [named])


def read_json(stream: TraceStream, checks: Checks) -> Items:
    """Read arrays, or objects with arrays, from JSON, or from one JSON a line."""
    documents = _parse(_whole(stream, checks, MAX_JSON_LENGTH), checks)
    requests = [request for document in documents for request in _requests(document, checks)]
    yield from _read_all(stream, checks, requests)


def _read_all(stream: TraceStream, checks: Checks, documents: list[list[Named]]) -> Items:
    """Read arrays; those of vLLM in a document are one request, each other array is one."""
    requests = []
    for arrays in documents:
        for name, array in arrays:
            # The last axis of counts has all experts.
            if name == _COUNTED and array.ndim == 3 and 1 <= array.shape[2] <= MAX_NUMBER + 1:
                checks.state(Dimensions(expert_count=array.shape[2]), f"array {name}")
        tokens = [(name, array) for name, array in arrays if name != _COUNTED]
        if any(array.size for _, array in tokens):
            problem = "arrays that count the selections of the others again"
            checks.warn(problem, len(arrays) - len(tokens))
            arrays = tokens
        of_vllm = [(name, array) for name, array in arrays if name in _PHASES]
        requests += [of_vllm] if of_vllm else []
        requests += [[(name, array)] for name, array in arrays if name not in _PHASES]
    names = {name for request in requests for name, _ in request}
    unknown = set()
    if names & _PASSES:
        unknown |= {Unknown.REQUESTS}
    if not names <= set(_PHASES):
        unknown |= {Unknown.PHASES}
    if _COUNTED in names:
        unknown |= {Unknown.TOKENS}
    if not names <= _PASSES and checks.shape is None:
        unknown |= {Unknown.LAYERS}
    yield Origin("array", stream.name, frozenset(unknown))
    for number, request in enumerate(requests):
        for name, array in request:
            # Passes of an engine are no requests.
            yield from _pieces(name, array, 0 if name in _PASSES else number, checks)


def _pieces(name: str, array: Array, request: int, checks: Checks) -> Iterator[Piece]:
    place = f"array {name}" if name else "array"
    if not array.size and array.ndim < 3:  # JSON's []: a request without tokens
        return
    if array.ndim != 3 or array.dtype.kind not in "iu":
        expected, actual = "three axes of whole numbers", f"{array.shape} {array.dtype}"
        raise checks.error("not an array of experts", place, expected, actual)
    if not array.size:
        return
    # Axes that no model has are refused before anything of their lengths is made.
    layer_count = array.shape[0 if name == "topk_ids_of_layer" else 1]
    is_wide = max(layer_count, array.shape[2]) > MAX_NUMBER + 1
    if is_wide or (name == _COUNTED and layer_count * array.shape[2] > MAX_PLACES):
        problem = "an array of more layers or experts than any model has"
        raise checks.error(problem, place, actual=array.shape)
    if array.dtype == np.uint64 and np.any(array > MAX_COUNT):
        raise _out_of_bounds(int(array[array > MAX_COUNT][0]), checks, place)
    if name == _COUNTED:
        yield from _counts(array, checks, place)
        return
    if name == "topk_ids_of_layer":
        array = array.swapaxes(0, 1)
        layers = np.arange(array.shape[1])
    else:
        layers = _layer_numbers(array.shape[1], checks, place)
    phase = _PHASES.get(name, Phase.UNKNOWN)
    step = max(1, _PIECE_SELECTIONS // max(1, array.shape[1] * array.shape[2]))
    for first in range(0, len(array), step):
        chunk = array[first : first + step]
        yield from _tokens(chunk, first, layers, request, phase, checks, place)


def _tokens(
    array: Array, before: int, layers: Ints, request: int, phase: Phase, checks: Checks, place: str
) -> Iterator[Piece]:
    """Make tokens of [tokens, layers, experts used]; there were some `before`."""
    experts = np.asarray(array, np.int64)
    is_there = experts != -1
    token, axis, _ = np.nonzero(is_there)
    layer, expert = layers[axis], experts[is_there]

    def place_of(index: int) -> str:
        return f"{place}, token {before + token[index]}"

    right = checks.fitting(layer, expert, place_of)
    if right is not None:
        token, layer, expert = token[right], layer[right], expert[right]
    starts = np.flatnonzero(changes(token))
    count = len(starts)
    if count:
        tokens = Tokens(
            np.full(count, request, np.int64),
            np.full(count, phase, np.uint8),
            np.append(starts, len(token)),
            shorts(layer),
            shorts(expert),
        )
        yield checks.tokens(tokens, place_of)


def _counts(array: Array, checks: Checks, place: str) -> Iterator[Piece]:
    if np.any(array < 0):
        raise checks.error("a negative count", place)
    total = np.zeros(array.shape[1:], np.int64)
    for counts in array:
        total += counts.astype(np.int64)
        if total.min(initial=0) < 0:  # two numbers below 2^63 add up to less than 2^64
            raise checks.error("counts out of bounds", place)
    layer, expert = np.nonzero(total)
    yield checks.counts(Phase.UNKNOWN, layer, expert, total[layer, expert], lambda _: place)


def _layer_numbers(count: int, checks: Checks, place: str) -> Ints:
    """Return the blocks of an array's layers, which are only those with experts."""
    if checks.shape is None:
        return np.arange(count)
    if count != len(checks.expert_counts):
        expected = f"{len(checks.expert_counts)} layers with experts"
        raise checks.error("the array is of a model with other layers", place, expected, count)
    return np.array(sorted(checks.expert_counts), np.int64)


def _load(stream: TraceStream, checks: Checks) -> Array:
    """Read a .npy; a plain one is mapped."""
    head = stream.peek(_HEADER_LENGTH)
    try:
        shape, dtype = _read_header(head)
        if dtype.hasobject:
            raise checks.error("an array of Python objects", hint=CONVERTER)
        if stream.is_plain:
            return np.asarray(np.load(stream.path, mmap_mode="r", allow_pickle=False))
        data = _whole(stream, checks, MAX_LENGTH)
        if math.prod(shape) * dtype.itemsize > len(data):
            raise ValueError("it ends too early")
        return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
    except _BAD_ARRAYS as error:
        raise _unreadable(checks, error) from None


def _read_header(head: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    file = io.BytesIO(head)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(np.lib.format.read_magic(file))
    if read is None:
        raise ValueError("an unknown version of .npy")
    shape, _, dtype = read(file)
    return shape, dtype


def _unreadable(checks: Checks, error: Exception) -> TraceError:
    hint = CONVERTER if "ickle" in str(error) else "it was cut short or damaged"
    return checks.error(f"cannot be read as arrays: {error}", hint=hint)


def _whole(stream: TraceStream, checks: Checks, limit: int) -> bytes:
    data = stream.read_whole(limit + 1)
    if len(data) > limit:
        raise _too_long(checks, limit)
    return data


def _too_long(checks: Checks, limit: int) -> TraceError:
    hint = "save it as a plain .npy"
    return checks.error("too long", expected=f"up to {size_text(limit)}", hint=hint)


def _parse(data: bytes, checks: Checks) -> list[Any]:
    try:
        return [json.loads(data)]
    except (ValueError, RecursionError) as error:
        first = error
    try:
        return [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        raise checks.error(f"not JSON: {first}", hint="was it cut short?") from None


def _requests(document: Any, checks: Checks) -> list[list[Named]]:
    """Find the arrays of each request in a document."""
    if isinstance(document, list) and document and not isinstance(document[0], dict):
        return [[("", _array(document, "", checks))]]
    requests = [document]
    if isinstance(document, list):
        requests = document
    elif isinstance(document, dict):
        requests = next((document[key] for key in _LISTS if key in document), requests)
    arrays = [_arrays(item, checks) for item in requests] if isinstance(requests, list) else []
    if not any(arrays):
        expected = f"an array, or objects with {', '.join(_NAMES)}"
        keys = ", ".join(document) or "nothing" if isinstance(document, dict) else None
        actual = keys and f"an object with {keys}"
        raise checks.error("no arrays of experts in it", None, expected, actual)
    return arrays


def _arrays(request: Any, checks: Checks) -> list[Named]:
    """Find the arrays of one request, and of the answers in it."""
    if not isinstance(request, dict):
        return []
    arrays = [
        (name, _array(request[name], name, checks))
        for name in _NAMES
        if request.get(name) is not None
    ]
    for key in _ANSWERS:
        answers = request.get(key)
        for answer in answers if isinstance(answers, list) else []:
            arrays += _arrays(answer, checks)
    return arrays


def _array(value: Any, name: str, checks: Checks) -> Array:
    place = f"array {name}" if name else "array"
    try:
        array = np.array(value)
    except (ValueError, OverflowError) as error:
        raise checks.error(f"not an array: {error}", place) from None
    if array.dtype.kind not in "iu" and (large := _first_large(value)) is not None:
        raise _out_of_bounds(large, checks, place)
    return array


def _first_large(value: Any) -> int | None:
    """Return a whole number beyond 64 bits, which numpy would make a fraction or an object."""
    if isinstance(value, list):
        return next((large for large in map(_first_large, value) if large is not None), None)
    return value if type(value) is int and abs(value) > MAX_COUNT else None


def _out_of_bounds(number: int, checks: Checks, place: str) -> TraceError:
    return checks.error("a number out of bounds", place, f"<= {MAX_COUNT}", number)
