"""Traces that are refused."""

from pathlib import Path
from typing import Any

import pytest

from moepack.errors import TraceError
from tests.support.hostile_input import assert_clear
from tests.support.trace_samples import (
    read,
)


def refused(path: Path, **options: Any) -> TraceError:
    """Read what cannot be read; give the error."""
    with pytest.raises(TraceError) as caught:
        read(path, **options)
    assert_clear(caught.value, path)
    return caught.value
