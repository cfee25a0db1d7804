"""A file to read from, where no model is: written for a measurement, and removed after it."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Not `np.random`, which numpy imports only when it is first used: Cython modules clear errors while
# they begin, so that an interruption then would be lost.
from numpy.random import SFC64

from moepack.errors import MachineError, RequestError, write_failure
from moepack.sizes import exact_size_text
from moepack.storage import page_cache
from moepack.storage.atomic import sync_file
from moepack.storage.space import free_space

_PIECE = 16 << 20
LEAST_LENGTH = 16 * _PIECE
"""With less, too much of it lies in the drive's own memory."""


@contextlib.contextmanager
def scratch_file(
    directory: Path, length: int, progress: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Yield a file of `length` random bytes in `directory`, on the drive and not in the page cache.

    It has at most half of the space that is free there. Whatever ends the block removes it.
    Raises RequestError where there is no such folder, MachineError where nothing can be written.
    """
    if not directory.is_dir():
        raise RequestError("no such folder", path=directory, hint="make it, or choose another")
    least, room = min(length, LEAST_LENGTH), free_space(directory) // 2
    if room < least:
        raise MachineError(
            "not enough space for a file to read from",
            path=directory,
            expected=f"{exact_size_text(2 * least)} free",
            found=exact_size_text(2 * room),
            hint="free some, choose another `directory`, or name a model on the drive",
        )
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(
                tempfile.NamedTemporaryFile(dir=directory, prefix="moepack-scratch-")
            )
            path = Path(file.name)
            for piece in _random(min(length, room)):
                file.write(piece)
                progress()
            file.flush()
            sync_file(path)
        except OSError as error:
            raise write_failure(error, directory) from None
        page_cache.drop([path])
        yield path


def _random(length: int) -> Iterator[bytes]:
    """Yield bytes that no drive can store in less, piece by piece."""
    draw = SFC64()
    for start in range(0, length, _PIECE):
        yield draw.random_raw(_PIECE // 8).tobytes()[: length - start]
