"""Files appear whole or not at all; what is no regular file is not waited for, nor replaced."""

import os
import stat
from pathlib import Path

import pytest

from moepack.common.errors import MachineError
from moepack.storage.atomic import publish, whole_file, write_whole
from moepack.storage.regular_file import NotRegularError, open_regular, read_back
from tests.support.children import within
from tests.support.special_files import SPECIAL, is_special, make_special


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def write_half() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_system_refuses_is_said_of_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot write: No such file") as caught:
        write_whole(tmp_path / "missing" / "file", b"")
    assert caught.value.path == str(tmp_path / "missing" / "file")


def test_a_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    write_whole(target, b"old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """As root, a rename would put a file in the place of a device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]
    with pytest.raises(MachineError, match="cannot write: a directory, not a regular file"):
        write_whole(tmp_path, b"")


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_never_replaced_nor_put_in_the_place_of_one(
    kind: str, tmp_path: Path
) -> None:
    path, partial = tmp_path / "file", tmp_path / "file.partial"
    make_special(kind, partial)
    path.write_bytes(b"old")
    with pytest.raises(MachineError, match="not a regular file") as caught:
        write_whole(path, b"new")
    assert caught.value.path == str(partial)
    with pytest.raises(OSError, match="not a regular file"):
        publish(path, partial)
    assert path.read_bytes() == b"old"
    assert is_special(kind, partial)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_file_in_the_making_is_not_written_through_a_link(kind: str, tmp_path: Path) -> None:
    victim, partial = tmp_path / "victim", tmp_path / "file.partial"
    make_special(kind, victim)
    partial.symlink_to(victim)
    with pytest.raises(MachineError, match="cannot write"):
        write_whole(tmp_path / "file", b"new")
    assert is_special(kind, victim)
    victim.unlink()
    victim.write_bytes(b"old")
    with pytest.raises(MachineError, match="cannot write"):
        write_whole(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"old"


def test_a_drive_is_not_written_to_as_a_pipe_is(tmp_path: Path) -> None:
    make_special("a drive", tmp_path / "drive")
    with pytest.raises(MachineError, match="a device, not a regular file"):
        write_whole(tmp_path / "drive", b"new")


def test_a_regular_file_is_read_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    descriptor = open_regular(path)
    try:
        assert os.get_blocking(descriptor)
        assert os.read(descriptor, 9) == b"bytes"
    finally:
        os.close(descriptor)


def test_of_a_file_that_is_read_back_no_more_is_taken_than_needed(tmp_path: Path) -> None:
    """A byte more than expected shows that it is too long."""
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    assert read_back(path, 5) == b"bytes"
    assert read_back(path, 2) == b"byt"


def test_a_fifo_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at what there is and its opening."""
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.touch()
    os.mkfifo(fifo)
    before = file.stat()
    assert stat.S_ISREG(before.st_mode)
    monkeypatch.setattr(os, "stat", lambda *_, **__: before)
    with pytest.raises(NotRegularError, match="a FIFO"):
        within(lambda: open_regular(fifo))
