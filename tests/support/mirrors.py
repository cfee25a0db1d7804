"""Packs that have a mirror."""

from pathlib import Path

import moepack


def mirror(pack: Path, *, hottest: int | None = None) -> Path:
    """Mirror a pack in a folder beside it; return the folder with the copies."""
    target = pack.parent / "second drive"
    target.mkdir(exist_ok=True)
    return Path(moepack.mirror_pack(pack, target, hottest=hottest).path)
