"""What the examples read, and what Python says of it."""

from pathlib import Path

import pytest

from moepack.packing.shard_index import index_model
from tests.support.models import first_shard


@pytest.fixture(scope="session")
def sources(packs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give a pack with parts of all kinds, and indexes over its shards with and without digests."""
    folder = tmp_path_factory.mktemp("sources")
    index_model(first_shard("gpt-oss"), folder / "with", digests=True)
    index_model(first_shard("gpt-oss"), folder / "without")
    return {
        "pack": packs["gpt-oss"],
        "with digests": folder / "with",
        "without": folder / "without",
    }
