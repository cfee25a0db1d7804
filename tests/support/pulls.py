"""Packs on a web server, and pulls of them."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import moepack
from moepack.pack.reading.pack import Pack
from moepack.packing.copies import packed_items
from moepack.storage.remote import store as remote_store
from moepack.storage.remote.stores import forget_stores
from tests.support.models import keys_of, tree
from tests.support.remote_servers import FileServer, file_server

MARKS = {".pull.json", ".pull.manifest"}


@contextlib.contextmanager
def quick_stores(cache: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for nothing, ask stores for short ranges, and keep what is kept in `cache`."""
    pytest.importorskip("obstore")
    patch.setattr(remote_store, "PAUSES", (0.0,) * 4)
    patch.setattr(packed_items, "RUN_LENGTH", 100_000)
    patch.setattr(packed_items, "_MAX_GAP", 8 << 10)
    patch.setenv("XDG_CACHE_HOME", str(cache))
    forget_stores()
    yield
    forget_stores()


@contextlib.contextmanager
def store_of_packs(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Serve a folder of packs; nothing is waited for, and ranges are short."""
    with quick_stores(folder.parent / "cache", patch), file_server(folder) as server:
        yield server


def local_keys(pack: Pack) -> set[tuple[int, int]]:
    return {key for key in keys_of(pack) if pack.is_local(*key)}


def check_part(folder: Path, original: Path) -> set[tuple[int, int]]:
    """Check that what is said to be in a partial pack is there; return its experts."""
    with moepack.Pack(folder) as part, moepack.Pack(original) as whole:
        here = local_keys(part)
        for layer, expert in here:
            where = part.locate(layer, expert)
            assert where.path.parent == folder
            with where.path.open("rb") as file:
                file.seek(where.offset)
                data = file.read(where.length)
            with whole.reader(backend="buffered") as reader:
                assert data == reader.read(layer, expert)
    report = moepack.verify(folder)
    assert not report.findings
    assert report.checked_blob_count == len(here)
    return here


def is_same(folder: Path, original: Path) -> bool:
    """Return whether two folders have the same files with the same bytes."""
    return tree(folder) == tree(original)


def copy_pack(pack: Path, store: Path, name: str = "a.moepack") -> Path:
    return Path(shutil.copytree(pack, store / name))
