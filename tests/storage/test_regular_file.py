"""What is no regular file is not waited for, nor opened by mistake."""

import os
import stat
from pathlib import Path

import pytest

from moepack.storage.regular_file import NotRegularError, open_regular, read_back
from tests.support.children import within


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
