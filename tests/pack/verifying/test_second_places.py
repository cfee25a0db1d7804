"""Files of second places: their bytes are checked, their lengths are free."""

from pathlib import Path

import pytest

import moepack
from moepack.common.errors import PackError
from moepack.pack.verifying.verifier import verify
from moepack.packing.restore import restore
from tests.support.models import contents, flip
from tests.support.pack_draft import Draft, draft, second_places, tiny

__all__ = ["draft", "tiny"]


def test_a_link_that_leads_nowhere_is_a_file_that_is_missing(draft: Draft) -> None:
    second_places(draft)
    draft.save()
    (draft.path / "second.bin").unlink()
    (draft.path / "second.bin").symlink_to("nowhere")
    assert verify(draft.path).passed


def test_their_files_have_any_length_and_are_zero_elsewhere(draft: Draft) -> None:
    second_places(draft)
    draft.lengthen(3, bytes(5))
    draft.save()
    assert verify(draft.path).passed
    flip(draft.path / "second.bin", 4099)
    (finding,) = verify(draft.path).findings
    assert (finding.kind, finding.file, finding.offset) == ("padding", "second.bin", 4099)


def test_reading_and_restoring_look_at_none_of_them(draft: Draft, tiny: Path) -> None:
    second_places(draft)
    draft.save()
    flip(draft.path / "second.bin", 3)
    with moepack.open(draft.path) as pack, pack.reader() as reader:
        assert reader.read(0, 0)
        assert not any(path.name == "second.bin" for path in pack.file_paths)
    restore(draft.path, draft.path.parent / "restored")
    restored = draft.path.parent / "restored" / "m.gguf"
    assert restored.read_bytes() == (tiny.parent / "m.gguf").read_bytes()


def test_they_are_not_left_behind_by_restoring_in_place(draft: Draft) -> None:
    second_places(draft)
    draft.save()
    before = contents(draft.path)
    with pytest.raises(PackError, match="has files of second places"):
        restore(draft.path, draft.path.parent / "restored", in_place=True)
    assert contents(draft.path) == before
