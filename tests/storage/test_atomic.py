"""Files appear whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from moepack.errors import MachineError
from moepack.storage.atomic import whole_file, write_whole


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as partial:
        partial.write_bytes(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def write_half() -> None:
        with whole_file(path) as partial:
            partial.write_bytes(b"half")
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
    with pytest.raises(MachineError, match="cannot write: Is a directory"):
        write_whole(tmp_path, b"")
