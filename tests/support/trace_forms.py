"""The same trace in every format, and how it is read back."""

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from moepack.trace.formats import number_text, rows
from tests.support.trace_samples import (
    BINARIES,
    DECODE,
    PREFILL,
    TEXTS,
    Call,
    TokenExperts,
    Trace,
)

FEW = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ALL = TEXTS | BINARIES
PACKINGS = ("", ".gz", ".zst", ".xz", ".bz2")
SMALL: Trace = [
    [Call(PREFILL, [{3: [7, 1], 5: [2, 0, 4]}, {3: [300, 1], 5: [1, 2, 3]}]),
     Call(DECODE, [{3: [5, 6], 4: [8], 5: [1]}])],
    [Call(DECODE, [{3: [1, 1023], 5: [10, 11]}]), Call(DECODE, [{3: [2], 5: [3]}])],
]  # fmt: skip


@contextmanager
def pieces_of(length: int) -> Iterator[None]:
    """Let files be read in tiny pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "texts", partial(number_text.texts, length=length))
        patch.setattr("moepack.trace.formats.mblt._READ_LENGTH", length)
        patch.setattr("moepack.trace.formats.arrays._PIECE_SELECTIONS", length)
        patch.setattr("moepack.trace.formats.registry._HEAD_LENGTH", 1 << 12)
        yield


def big_trace(calls: int, experts: int) -> Trace:
    rng = random.Random(1)
    layers = range(3, 99, 8)

    def token() -> TokenExperts:
        return {layer: rng.sample(range(experts), 4) for layer in layers}

    prompts = [Call(PREFILL, [token() for _ in range(20)]) for _ in range(2)]
    return [[prompt, *(Call(DECODE, [token()]) for _ in range(calls))] for prompt in prompts]


BIG = big_trace(100, 999)


def npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()
