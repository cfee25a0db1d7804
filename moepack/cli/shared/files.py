"""Files of commands: checks of outputs, standard output as a file, and prompts."""

import contextlib
import os
import select
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from moepack.cli.shared.parameters import STANDARD_STREAM
from moepack.cli.shared.terminal import complain
from moepack.common.errors import RequestError
from moepack.common.pack_files import is_in_pack
from moepack.storage.atomic import refuse_existing, refuse_special, require_folder_of
from moepack.storage.regular_file import is_stream

MAX_PROMPT = 1 << 24
"""Characters of a prompt from a file: more than any context has room for."""
_SECONDS_FOR_PIPE = 3.0


@contextlib.contextmanager
def output_file(
    path: str,
    *,
    force: bool,
    resume: bool = False,
    inputs: Sequence[str] = (),
    suffix: str = "",
) -> Iterator[str]:
    """Check the output of a command before its work, and yield the path.

    For `-` it is a temporary file with `suffix`, whose bytes go to standard output when the block
    ends, however it ends.
    """
    _check_output(path, force, resume, inputs)
    if path != STANDARD_STREAM:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="moepack-") as folder:
        temporary = os.path.join(folder, f"output{suffix}")
        try:
            yield temporary
        except BaseException as error:
            notes = getattr(error, "__notes__", [])
            notes[:] = [note.replace(temporary, "standard output") for note in notes]
            raise
        finally:
            if os.path.exists(temporary):
                with open(temporary, "rb") as file:
                    shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
                sys.stdout.buffer.flush()


@contextlib.contextmanager
def picture_file(path: str | None, *, force: bool, inputs: Sequence[str]) -> Iterator[str | None]:
    """Check the path of a picture, as `output_file` does, and yield it; None without a path.

    On standard output it is SVG. Raises MachineError if nothing can be drawn here.
    """
    if path is None:
        yield None
        return
    from moepack.report import chart

    with output_file(path, force=force, inputs=inputs, suffix=".svg") as target:
        chart.check(target)
        yield target


def _check_output(path: str, force: bool, resume: bool, inputs: Sequence[str]) -> None:
    """Raise RequestError if a file must not be written.

    It exists, without `force` to write over it or `resume` to continue it; it is one of `inputs`, a
    GGUF or a file of a pack, even with `force`; or it is a folder or a drive, or its folder is
    missing. A stream, such as a FIFO, is written to.
    """
    if path == STANDARD_STREAM:
        if resume:
            raise RequestError("standard output cannot be continued", place="--resume")
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
    name = "choose another name; --force has no effect"
    is_gguf = ".gguf" in target.name.lower()  # also a piece of one
    if not is_gguf:
        with open(target, "rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    if is_gguf:
        raise RequestError("a GGUF is never overwritten", path=path, hint=name)
    if is_in_pack(target):
        raise RequestError("a file of a pack is never overwritten", path=path, hint=name)
    refuse_existing(path, force=force or resume)


def read_prompt(path: str) -> str:
    """Return the text in a file, without its last new line, which editors add.

    Raises RequestError if it cannot be read, or is too long.
    """
    from moepack.running.serving.server_options import read_text  # slow to load

    return read_text(path, "prompt", MAX_PROMPT).removesuffix("\n")


def read_piped_text() -> str:
    """Return the text in a pipe or a file that is standard input, as `read_prompt` does.

    Programs may start others with a pipe that never ends: only so long is waited for its begin.
    """
    kind = stat.S_IFMT(os.fstat(0).st_mode)
    if kind not in (stat.S_IFIFO, stat.S_IFREG, stat.S_IFSOCK):
        return ""
    if not select.select([0], [], [], _SECONDS_FOR_PIPE)[0]:
        complain("note", "nothing comes on standard input: it is left out; -p - waits for it")
        return ""
    with open(0, encoding="utf-8", errors="replace", closefd=False) as file:
        text = file.read(MAX_PROMPT + 1)
    if len(text) > MAX_PROMPT:
        expected = f"up to {MAX_PROMPT:,} characters"
        raise RequestError("the text on standard input is too long", expected=expected)
    return text.removesuffix("\n")
