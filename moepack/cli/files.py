"""Files that commands write: what may be written over, and standard output as one of them."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from moepack.cli.parameters import STANDARD_STREAM, OutputFile
from moepack.errors import RequestError
from moepack.storage.atomic import refuse_existing, refuse_special, require_folder_of
from moepack.storage.pack_files import is_in_pack
from moepack.storage.regular_file import is_stream

output_option = click.option(
    "-o",
    "--output",
    required=True,
    type=OutputFile(),
    metavar="FILE",
    help="The file to write; - is standard output.",
)
force_option = click.option("--force", is_flag=True, help="Write over a file that exists.")


@contextlib.contextmanager
def output_file(
    path: str,
    *,
    force: bool,
    append: bool | None = None,
    inputs: Sequence[str] = (),
    suffix: str = "",
) -> Iterator[str]:
    """Check where a command is to write, and yield the path to write to.

    Checks come first, so that no work is lost: see `check_output`. For `-` it is a temporary file
    with `suffix`, whose bytes go to standard output in the end, whatever ends the block.
    """
    check_output(path, force=force, append=append, inputs=inputs)
    if path != STANDARD_STREAM:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="moepack-") as folder:
        held = os.path.join(folder, f"output{suffix}")
        try:
            yield held
        except BaseException as error:
            notes = getattr(error, "__notes__", [])
            notes[:] = [note.replace(held, "standard output") for note in notes]
            raise
        finally:
            if os.path.exists(held):
                with open(held, "rb") as file:
                    shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
                sys.stdout.buffer.flush()


@contextlib.contextmanager
def picture_file(path: str | None, *, force: bool, inputs: Sequence[str]) -> Iterator[str | None]:
    """Check where a picture is to be drawn, as `output_file` does; without a path yield None.

    On standard output it is SVG. Raises MachineError where nothing can be drawn here.
    """
    if path is None:
        yield None
        return
    from moepack.report import chart

    with output_file(path, force=force, inputs=inputs, suffix=".svg") as target:
        chart.check(target)
        yield target


def check_output(
    path: str, *, force: bool, append: bool | None = None, inputs: Sequence[str] = ()
) -> None:
    """Raise RequestError where a file must not be written.

    It exists, and nobody asked to write over it (`force`) or to add to it (`append`; None where
    that cannot be); it is one of `inputs`, a GGUF or a file of a pack, which nobody may ask for; or
    it is a folder or a drive, or has no folder. A stream, such as a FIFO, is written to.
    """
    if path == STANDARD_STREAM:
        if append:
            raise RequestError("nothing can be added to standard output", place="--append")
        return
    require_folder_of(path)
    if os.path.isdir(path):
        raise RequestError("a folder, not a file to write", path=path)
    if is_stream(path):
        return
    refuse_special(path)
    target = Path(os.path.realpath(path))
    if not target.is_file():
        return
    if any(os.path.exists(other) and os.path.samefile(target, other) for other in inputs):
        raise RequestError("it is one of the files to read", path=path)
    if _is_gguf(target):
        raise RequestError("a GGUF is never written over", path=path, hint=_OTHER_NAME)
    if is_in_pack(target):
        raise RequestError("a file of a pack is never written over", path=path, hint=_OTHER_NAME)
    refuse_existing(path, force=force, append=append)


_OTHER_NAME = "choose another name; --force changes nothing"


def _is_gguf(path: Path) -> bool:
    """Say whether a file may be a shard, or a piece of one."""
    if ".gguf" in path.name.lower():
        return True
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"
