"""The C test program, and small packs to read and to damage."""

from pathlib import Path

import pytest

from moepack.packing.shard_index import index_model
from tests.support.c_compiler import SANITIZERS, compiled_once
from tests.support.gguf_builder import F32, moe
from tests.support.light_folder import tmp_path
from tests.support.pack_draft import tiny

__all__ = ["tiny", "tmp_path"]


@pytest.fixture(scope="session")
def program() -> Path:
    """Compile the C test program, with sanitizers."""
    return compiled_test(*SANITIZERS)


@pytest.fixture(scope="session")
def vectored() -> Path:
    """Compile the C test program where preadv is declared; `program` is without it."""
    return compiled_test("-D_GNU_SOURCE", *SANITIZERS)


@pytest.fixture(scope="session")
def plain() -> Path:
    """Compile the C test program for valgrind, which does not go with sanitizers."""
    return compiled_test("-D_GNU_SOURCE", "-g", "-O1")


def compiled_test(*flags: str) -> Path:
    source = Path(__file__).parent / "reader_test.c"
    return compiled_once("reader_test", "cc", "-std=c99", *flags, source)


@pytest.fixture(scope="session")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay an index over a model like that of `tiny`, with digests; read-only."""
    folder = tmp_path_factory.mktemp("apart")
    model = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(folder / "m.gguf")
    index_model(model, folder / "index", digests=True)
    return folder / "index"


@pytest.fixture(params=["tiny", "apart"])
def either(request: pytest.FixtureRequest) -> Path:
    """Give a pack with blobs, then an index over shards; read-only."""
    return Path(request.getfixturevalue(request.param))
