"""The files that come with moepack: layouts, and the header for C."""

from pathlib import Path

from moepack.common.errors import MachineError

_PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """Return the folder `name` (`layouts`, `include`): the wheel has it inside the package.

    A checkout has it beside the package. Raises MachineError if there is neither.
    """
    for place in (_PACKAGE / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    hint = "install moepack again"
    raise MachineError(f"{name} was not installed", path=_PACKAGE, hint=hint)
