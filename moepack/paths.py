"""Paths as callers name them: one, or several."""

import os
from collections.abc import Sequence

AnyPath = str | os.PathLike[str]
PathOrPaths = AnyPath | Sequence[AnyPath]


def listed(named: PathOrPaths) -> list[AnyPath]:
    """Return what was named as a list, also where it is one path."""
    return [named] if isinstance(named, str | os.PathLike) else list(named)
