"""Packs that have a mirror."""

from pathlib import Path

import moepack
from moepack.pack.reading.pack import Pack
from tests.support.models import keys_of, on_disk


def mirror(pack: Path, *, hottest: int | None = None) -> Path:
    """Mirror a pack in a folder beside it; return the folder with the copies."""
    target = pack.parent / "second drive"
    target.mkdir(exist_ok=True)
    return Path(moepack.mirror_pack(pack, target, hottest=hottest).path)


def reads_right(pack: Pack, reader: moepack.Reader, rounds: int = 1) -> None:
    """Read all experts, each by itself and then all together, and compare them with the pack."""
    keys = keys_of(pack)
    for _ in range(rounds):
        for key in keys[::3]:
            assert reader.read(*key) == on_disk(pack.locate(*key))
        for one in reader.read_many(keys, in_order=False):
            assert one.view == on_disk(pack.locate(*keys[one.number]))
            one.release()
