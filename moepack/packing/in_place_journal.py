"""The journal of shards that are turned into a pack in place, or back.

It says where the shards belong when they are whole, and nothing that a byte on the disk could
contradict: which bytes are in the pack and which in the shards is found out by their digests, every
time that the work is taken up. A journal that is damaged or lost therefore costs no more than those
names. It is also the lock.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from moepack.errors import MachineError
from moepack.packing.line_log import LineLog

_VERSION = 2


class Shard(NamedTuple):
    """A shard as it was: the path where it belongs, its length in bytes, and its mtime.

    `home` is None where nobody knows it any more, `mtime_ns` for a shard that was made of a pack.
    """

    home: str | None
    length: int
    mtime_ns: int | None

    @classmethod
    def from_json(cls, entry: Any) -> Self:
        """Read a shard's entry; raises TypeError or ValueError."""
        home, length, mtime_ns = entry
        if not isinstance(home, str | None) or type(length) is not int:
            raise TypeError("not a shard")
        if mtime_ns is not None and type(mtime_ns) is not int:
            raise TypeError("not a time")
        return cls(home, length, mtime_ns)


class Beginning(NamedTuple):
    """The first line. `was_pack` says that the shards were not there at the beginning.

    `unit_length` is in bytes: pieces that are longer were cut there.
    """

    tool: str
    was_pack: bool
    unit_length: int
    shards: tuple[Shard, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the first line."""
        return {"version": _VERSION} | self._asdict() | {"shards": [list(s) for s in self.shards]}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """Read the first line; raises KeyError, TypeError or ValueError."""
        if entry["version"] != _VERSION or int(entry["unit_length"]) <= 0:
            raise ValueError("unknown version")
        shards = tuple(map(Shard.from_json, entry["shards"]))
        return cls(str(entry["tool"]), bool(entry["was_pack"]), int(entry["unit_length"]), shards)


class InPlaceJournal:
    """An open, locked journal.

    `beginning` is None where the first line is not there, or not whole. `is_damaged` says that a
    line is not what was written although others stand behind it: a crash does not leave that.
    `homes` are where the shards belong by now.
    """

    def __init__(self, log: LineLog) -> None:
        self._log = log
        self.path = log.path
        self.beginning: Beginning | None = None
        self.is_damaged = False
        self.homes: list[str | None] = []
        self._load()

    def _load(self) -> None:
        entries = list(self._log.entries())
        count = entries.index(None) if None in entries else len(entries)
        self.is_damaged = any(entry is not None for entry in entries[count:])
        if self.is_damaged or not count:
            return
        trusted = list(self._log.trusted())
        try:
            self.beginning = Beginning.from_json(trusted[0])
            homes = [shard.home for shard in self.beginning.shards]
            for entry in trusted[1:]:
                homes = [str(home) for home in entry["homes"]]
        except (KeyError, TypeError, ValueError):
            hint = "continue with the version that began it; do not remove the directory"
            problem = "the journal was written by another version of moepack"
            raise MachineError(problem, path=self._log.path, hint=hint) from None
        self.homes = homes
        self._log.keep(count)

    def begin(self, beginning: Beginning) -> None:
        """Write the first line, in place of all that was there."""
        self._log.begin(beginning.to_json())
        self._load()

    def set_homes(self, homes: list[str]) -> None:
        """Record where the shards belong from now on."""
        if homes != self.homes:
            self._log.append({"homes": homes})
            self.homes = list(homes)

    def remove(self) -> None:
        """Delete the journal and give up the lock."""
        self._log.remove()

    def close(self) -> None:
        """Give up the lock; the journal stays."""
        self._log.close()
