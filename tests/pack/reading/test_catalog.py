"""The facts that a pack tells: its shape, its hottest experts, and that it is closed."""

from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey
from moepack.pack.reading.pack import Pack
from tests.support.models import REAL_MODELS, first_shard, keys_of


@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_pack_and_its_source_have_the_same_experts(model: str, packs: dict[str, Path]) -> None:
    shape = moepack.shape_of(first_shard(model))
    with moepack.open(packs[model]) as pack:
        assert pack.shape == shape
        assert pack.shape.layers == pack.layers
        assert moepack.shape_of(packs[model]) == pack.shape


def test_the_hottest_experts_are_keys_by_name(pack: Pack) -> None:
    key = pack.hottest(1 << 40)[17]
    assert isinstance(key, ExpertKey)
    assert (key.layer, key.expert) == key == (1, 1)
    assert set(pack.hottest(1 << 40)) == set(keys_of(pack))
    with pack.reader() as reader:
        (expert,) = reader.read_many([key])
        assert (expert.layer, expert.expert) == key


def test_a_closed_pack_says_so_in_every_call(packs: dict[str, Path]) -> None:
    pack = moepack.open(packs["qwen3moe"])
    reader = pack.reader()
    pack.close()
    pack.close()
    calls: list[Callable[[], object]] = [
        lambda: pack.hottest(1 << 40),
        lambda: pack.locate(0, 0),
        lambda: pack.locate(0, 0, "up"),
        lambda: pack.families(0),
        lambda: pack.parts(0),
        lambda: pack.expert_count(99),
        lambda: pack.shape,
        lambda: pack.dense(),
        lambda: pack.locate_dense("token_embd.weight"),
        lambda: pack.reader(),
        lambda: reader.read(0, 0),
        lambda: reader.submit([(0, 0)]),
        lambda: reader.read_dense("token_embd.weight"),
    ]
    for call in calls:
        with pytest.raises(RequestError, match="the pack is closed"):
            call()
    reader.close()
