"""The journal of what is turned from shards into a pack in place, or back.

It says for each unit on which side it is whole and safe; nothing is ever taken from the other side,
and nothing is given up on that one. Each line is synced before the next step is taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn, Self

from moepack.errors import MachineError
from moepack.packing.line_log import LineLog
from moepack.packing.units import Unit

_VERSION = 1


class State(StrEnum):
    """What was last done with a unit, safely on disk."""

    PACKED = "packed"
    """Copied into the pack, read back and compared; shards may have holes there."""
    PUNCHED = "punched"
    """In the pack alone."""
    FILLED = "filled"
    """Copied back into the shards, read back and compared; the pack may lack it."""
    RELEASED = "released"
    """In the shards alone."""

    @property
    def is_in_pack(self) -> bool:
        """Whether the pack is the side that is whole."""
        return self in (State.PACKED, State.PUNCHED)


class Goal(StrEnum):
    """What the units are on their way to."""

    PACK = "pack"
    SHARDS = "shards"


class Shard(NamedTuple):
    """A shard: where it belongs when it is whole, and what it is recognised by.

    `mtime_ns` is what its time was; None for one that was not there before.
    """

    home: str
    inode: int
    length: int
    mtime_ns: int | None


class Beginning(NamedTuple):
    """What the first line says; `was_pack` where all was in the pack at the beginning."""

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
        if entry["version"] != _VERSION:
            raise ValueError("unknown version")
        shards = tuple(Shard(*shard) for shard in entry["shards"])
        return cls(str(entry["tool"]), bool(entry["was_pack"]), int(entry["unit_length"]), shards)


class InPlaceJournal:
    """An open, locked journal.

    `beginning` is None where nothing was begun. `homes` are where shards belong by now.
    """

    def __init__(self, log: LineLog) -> None:
        self._log = log
        self.beginning: Beginning | None = None
        self.goal = Goal.PACK
        self.is_done = False
        self.homes: list[str] = []
        self._entries: list[dict[str, Any]] = []
        self._states: list[State] = []
        self._digests: dict[int, array[int]] = {}
        self._load()

    def _load(self) -> None:
        entries = list(self._log.trusted())
        if not entries:
            return
        try:
            self.beginning = Beginning.from_json(entries[0])
        except (KeyError, TypeError, ValueError):
            self.fail("made by another version of moepack")
        self.homes = [shard.home for shard in self.beginning.shards]
        for entry in entries[1:]:
            if "goal" in entry:
                self.goal, self.homes = Goal(entry["goal"]), entry["homes"]
            elif "done" in entry:
                self.is_done = True
            else:
                self._entries.append(entry)
        self._log.keep(len(entries))

    def begin(self, beginning: Beginning) -> None:
        """Write the first line, which makes the directory an unfinished one."""
        self._log.begin(beginning.to_json())
        self._load()

    def take_up(self, units: Sequence[Unit]) -> None:
        """Take over what was done with `units`; raise MachineError where that makes no sense."""
        assert self.beginning is not None
        first = State.PUNCHED if self.beginning.was_pack else State.RELEASED
        self._states = [first] * len(units)
        for entry in self._entries:
            try:
                number, digests = entry["unit"], array("Q", bytes.fromhex(entry["digests"]))
                unit, state = units[number], State(entry["now"])
                if entry["place"] != [unit.file, unit.start, unit.end]:
                    raise ValueError("another place")
            except (KeyError, TypeError, ValueError, IndexError):
                self.fail("its units are not these: continue with the moepack that began it")
            self._states[number] = state
            if digests:
                self._digests[number] = digests
        in_pack = [state.is_in_pack for state in self._states]
        if in_pack != sorted(in_pack, reverse=True):
            self.fail("says that a unit is in the pack, but not the one before it")

    @property
    def packed_count(self) -> int:
        """How many units are in the pack: always the first ones."""
        return sum(state.is_in_pack for state in self._states)

    def state(self, unit: Unit) -> State:
        """Return what was last done with a unit."""
        return self._states[unit.number]

    def digests(self, unit: Unit) -> array[int] | None:
        """Return the digests of a unit's pieces; None where it was in the pack from the start."""
        return self._digests.get(unit.number)

    def note(self, unit: Unit, state: State, digests: array[int] | None = None) -> None:
        """Record what was done with a unit, and sync the record."""
        held = array("Q") if digests is None else digests
        self._log.append(
            {
                "unit": unit.number,
                "place": [unit.file, unit.start, unit.end],
                "now": state,
                "digests": held.tobytes().hex(),
            }
        )
        self._states[unit.number] = state
        if digests is not None:
            self._digests[unit.number] = digests

    def set_goal(self, goal: Goal, homes: list[str]) -> None:
        """Record where the work goes from now on, and where the shards belong."""
        if (goal, homes) != (self.goal, self.homes):
            self._log.append({"goal": goal, "homes": homes})
            self.goal, self.homes = goal, homes

    def finish(self) -> None:
        """Record that the goal is reached: what is left to do is to tidy up."""
        self._log.append({"done": True})
        self.is_done = True

    def remove(self) -> None:
        """Delete the journal and give up the lock."""
        self._log.remove()

    def close(self) -> None:
        """Give up the lock; the journal stays."""
        self._log.close()

    def fail(self, problem: str) -> NoReturn:
        """Raise the error for a journal that cannot be followed."""
        hint = "do not remove the directory: it may hold the only copy of the model"
        raise MachineError(
            f"cannot go on by this journal: {problem}", path=self._log.path, hint=hint
        )
