"""A hub for one test, in place of the real one."""

import contextlib
import shutil
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from moepack.storage import inputs
from moepack.storage.remote import store as remote_store
from moepack.storage.remote import stores
from tests.support.remote_servers import FakeHub

REPOSITORY = "someone/A-model"


@contextlib.contextmanager
def hub_of(
    folder: Path,
    patch: pytest.MonkeyPatch,
    files: Iterable[Path | str],
    inner: str = "",
    tls: ssl.SSLContext | None = None,
) -> Iterator[FakeHub]:
    """Serve a repository as the hub, with some files in its folder `inner`; nobody is logged in.

    In this process nothing is waited for, and ranges are short.
    """
    pytest.importorskip("obstore")
    constants = pytest.importorskip("huggingface_hub.constants")
    patch.setattr(remote_store, "PAUSES", (0.0,) * 4)
    patch.setattr(inputs, "RANGE_LENGTH", 100_000)
    (folder / REPOSITORY / inner).mkdir(parents=True)
    for file in files:
        copy = shutil.copytree if Path(file).is_dir() else shutil.copy
        copy(file, folder / REPOSITORY / inner / Path(file).name)
    with contextlib.closing(FakeHub(folder, tls)) as server:
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder.parent / "hub cache"))
        patch.setenv("HF_ENDPOINT", server.url)  # for children
        patch.setenv("HF_HOME", str(folder.parent / "hub home"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no token"))
        patch.delenv("HF_TOKEN", raising=False)
        stores.forget_stores()
        yield server
    stores.forget_stores()
