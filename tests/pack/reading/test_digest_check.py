"""When a part is compared with its digest: always, the first time, or never."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import PackError, RequestError
from moepack.pack.reading.checked_reads import LATER_PERIOD
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader
from tests.support.models import flip, on_disk
from tests.support.reads import nothing_left

WAYS: dict[str, Callable[[Reader, tuple[int, int]], memoryview]] = {
    "in this thread": lambda reader, key: reader.read(*key),
    "through a queue": lambda reader, key: next(reader.read_many([key])).view,
}


def spoil(pack: Pack, layer: int, expert: int, part: str) -> None:
    where = pack.locate(layer, expert, part)
    flip(where.path, where.offset + where.length // 2)


@pytest.mark.parametrize("way", WAYS)
def test_always_notices_what_changed_and_first_trusts_what_was_right_once(
    pack_copy: Path, way: str
) -> None:
    with (
        moepack.open(pack_copy) as pack,
        pack.reader() as always,
        pack.reader(check="first") as first,
        pack.reader(check="first") as another,
    ):
        for reader in (always, first):
            WAYS[way](reader, (0, 3))
        spoil(pack, 0, 3, "up")
        assert WAYS[way](first, (0, 3)) == on_disk(pack.locate(0, 3))
        for reader in (always, another, another):  # what was wrong is looked at again
            with pytest.raises(PackError, match=r"layer 0 expert 3 ffn_up_exps.*digest"):
                WAYS[way](reader, (0, 3))
        spoil(pack, 0, 3, "up")
        WAYS[way](another, (0, 3))


def test_first_knows_parts_experts_and_layers_apart(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack, pack.reader(check="first") as reader:
        reader.read(0, 3, "up")
        for layer, expert, part in ((0, 3, "down"), (0, 4, "up"), (1, 3, "up")):
            spoil(pack, layer, expert, part)
            with pytest.raises(PackError, match=f"layer {layer} expert {expert} .*{part}"):
                reader.read(layer, expert)
        with pytest.raises(PackError, match=r"layer 0 expert 3 ffn_down_exps"):
            list(reader.read_many([(0, 3)], parts=("up", "down")))


def test_first_checks_one_of_many_later_reads_too(pack_copy: Path) -> None:
    """Memory and drives fail late: what was right once is looked at again now and then."""
    with moepack.open(pack_copy) as pack, pack.reader(check="first") as reader:
        reader.read(0, 3)
        for _ in range(LATER_PERIOD):
            reader.read(0, 3)
        assert reader.statistics.rechecked_count == 1
        spoil(pack, 0, 3, "up")
        for _ in range(LATER_PERIOD - 1):
            reader.read(0, 3)
        with pytest.raises(PackError, match=r"layer 0 expert 3 ffn_up_exps.*digest"):
            reader.read(0, 3)
        assert reader.statistics.rechecked_count == 2


def test_never_looks_at_nothing(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack, pack.reader(check="never") as reader:
        spoil(pack, 0, 3, "up")
        for read in WAYS.values():
            assert read(reader, (0, 3)) == on_disk(pack.locate(0, 3))
        assert reader.statistics.error_count == 0


def test_another_word_is_the_callers_mistake(pack_copy: Path) -> None:
    expected = re.escape("no such check, expected always, first, never, found 'often'")
    with (
        moepack.open(pack_copy) as pack,
        nothing_left(),
        pytest.raises(RequestError, match=expected),
    ):
        pack.reader(check="often")
