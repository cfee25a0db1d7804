"""What to do about a directory that is left unfinished in place: the hint of every error there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moepack.errors import MoepackError, write_failure
from moepack.format import manifest
from moepack.packing.unfinished import Unfinished, is_unfinished

_KEEP = "do not remove the directory: it holds the model"


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what the system says into a MachineError, and say how to go on."""
    try:
        yield
    except OSError as error:
        raise write_failure(error, path, hint_of(path)) from error
    except MoepackError as error:
        hint = hint_of(path)
        if error.hint is None:
            error.hint = hint
        elif hint is not None:
            error.add_note(hint)
        raise
    except BaseException as error:
        if hint := hint_of(path):
            error.add_note(hint)
        raise


def hint_of(path: Path) -> str | None:
    """Return how to go on or back; None where nothing is left to do."""
    if not is_unfinished(path):
        return None
    forth, back = f"`moepack pack --in-place --resume -o {path}`", f"`moepack restore {path}`"
    go_on = f"go on with {forth}, or back with {back}; {_KEEP}"
    try:
        unfinished = Unfinished(path)
    except (OSError, MoepackError):
        return go_on
    try:
        if unfinished.is_untouched and not (path / manifest.NAME).exists():
            return f"the shards are where they belong; {back} removes what is left of the pack"
        if unfinished.journal.beginning is None:
            return (
                "the bytes tell where they belong: go on with"
                f" `moepack pack --in-place --resume --recover -o {path}`, or back with"
                f" `moepack restore {path} --recover -o FOLDER`; {_KEEP}"
            )
        if (path / manifest.NAME).exists():
            return f"the pack is whole; {forth} removes what is left of the shards"
        return go_on
    finally:
        unfinished.close()
