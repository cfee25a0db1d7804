"""Traces that are refused."""

from pathlib import Path
from typing import Any

from moepack.errors import TraceError
from tests.support.hostile_input import refused_by
from tests.support.trace_samples import (
    read,
)


def refused(path: Path, **options: Any) -> TraceError:
    """Read what cannot be read; give the error."""
    return refused_by(TraceError, path, lambda: read(path, **options))
