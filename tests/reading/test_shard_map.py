"""Where the bytes of each shard lie: what a map refuses."""

from pathlib import Path

import pytest

import moepack
from moepack.errors import PackError
from moepack.reading.shard_map import map_shards
from tests.support.broken_packs import Draft


def test_two_shards_of_one_name_are_refused(pack_copy: Path) -> None:
    draft = Draft(pack_copy)
    shards = draft.body["source"]["shards"]
    shards[1]["name"] = shards[0]["name"]
    draft.save_manifest()
    with moepack.open(pack_copy) as pack, pytest.raises(PackError, match="had the same name"):
        map_shards(pack)
