"""A hub for one test, in place of the real one."""

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from moepack.storage.remote import stores
from tests.support.remote_servers import FakeHub

REPOSITORY = "someone/A-model"


@contextlib.contextmanager
def hub_of(
    folder: Path, patch: pytest.MonkeyPatch, tls: ssl.SSLContext | None = None
) -> Iterator[FakeHub]:
    """Serve the repositories in a folder as the hub; nobody is logged in."""
    pytest.importorskip("obstore")
    constants = pytest.importorskip("huggingface_hub.constants")
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
