"""What may be read into, and what is said of the rest."""

import numpy as np
import pytest
from numpy.typing import NDArray

from moepack.common.errors import RequestError
from moepack.storage.buffers import writable_bytes


class Tensor:
    """Holds an array as tensors of torch do: without a buffer of its own."""

    def numpy(self) -> NDArray[np.uint8]:
        return np.zeros(8, np.uint8)


def test_a_tensor_is_refused_with_what_is_its_memory() -> None:
    with pytest.raises(RequestError, match="not a contiguous buffer") as caught:
        writable_bytes(Tensor(), 8)
    assert ".numpy()" in (caught.value.hint or "")
    assert len(writable_bytes(Tensor().numpy(), 8)) == 8


def test_what_is_no_tensor_gets_no_hint_for_one() -> None:
    with pytest.raises(RequestError) as caught:
        writable_bytes("text", 1)
    assert caught.value.hint is None
