"""The same trace in every format, how it is read back, and refused."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from tests.support.hostile_input import refused_by
from tests.support.trace_samples import (
    DECODE,
    PREFILL,
    TEXTS,
    Call,
    Sample,
    Trace,
    own,
    read,
    seen,
)

FEW = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ALL = TEXTS | {"moepack": Sample("moepack", own, seen)}
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
        patch.setattr("moepack.traces.formats.number_text.PIECE_LENGTH", length)
        patch.setattr("moepack.traces.formats.arrays._PIECE_SELECTIONS", length)
        patch.setattr("moepack.traces.formats.number_text._HEAD_LENGTH", 1 << 12)
        yield


def npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def refused(path: Path, **options: Any) -> TraceError:
    """Read a trace that cannot be read; return the error."""
    return refused_by(TraceError, path, lambda: read(path, **options))
