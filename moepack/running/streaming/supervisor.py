"""Plans and watches the programs that run a model: their caches bring experts by themselves."""

import errno
import mmap
import os
import select
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError, PackError, SourceError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey, ModelShape, is_row_table
from moepack.common.sizes import Size
from moepack.host.memory_limits import available_memory, memory_length, own_memory, read_memory
from moepack.pack.reading.expert_read import digest_error, file_error
from moepack.pack.reading.pack import Pack
from moepack.running.streaming.budget import (
    FreeMemory,
    MemoryParts,
    SlotLengths,
    check_memory,
    step_length,
)
from moepack.running.streaming.control import (
    Control,
    ExpertUsage,
    Prefetches,
    ProgramError,
    Selection,
)
from moepack.running.streaming.mapped_model import map_model
from moepack.running.streaming.record import Call, RoutingRecord
from moepack.running.streaming.table import BACKENDS, CacheChoices, ExpertTable
from moepack.traces.caching.cache import DEFAULT_POLICY

_SECONDS_BETWEEN = 1.0
"""The interval at which the free memory is looked at."""
_PATIENCE = 0.1
"""Seconds after which selections and errors of programs are read."""
_DIGEST_DIFFERS = 2
_KINDS = {number: name for name, (number, is_cached) in BACKENDS.items() if not is_cached}
"""The names of ways to read, by their number in native/drive.h."""


class StreamingOptions(NamedTuple):
    """How experts are kept in memory.

    `memory` is the bytes for experts, in whole pages, or a text: `8GiB`, `50%` of this machine's
    memory, `floor` for the least that works; by default the free memory, from second to second. Of
    the hottest, up to `pinned` bytes (`2GiB`, `10%` of the experts) are never evicted. `policy`,
    `backend` and `check` are names in POLICIES, BACKENDS and CHECKS of `table`. `micro_batch` is
    how many tokens programs compute at once: the experts of one such step have to fit. `most_used`
    in earlier runs, the most used first, with the shares of tokens that used them, are read while a
    program loads, as far as there is space. A token uses `experts_used` in each layer, by default
    as many as the model states. `beside` is what programs take beside experts: it is left of the
    free memory until they have taken it. With `prefetch` experts that the next layer's router names
    are read while a layer is computed.
    """

    memory: Size | None = None
    policy: str = DEFAULT_POLICY
    pinned: Size | None = None
    backend: str = "auto"
    check: str = "first"
    micro_batch: int = 512
    most_used: Mapping[ExpertKey, float] = {}
    experts_used: int | None = None
    beside: MemoryParts = MemoryParts()
    prefetch: bool = True


class Supervisor(Closing):
    """The table and the control file for programs that run `pack`, which has to stay open.

    `failed` is called with each error for which a program could not go on. With `records`
    selections are recorded for `pop_calls`; with `counts` those of steps of few tokens are kept for
    `pop_selections`, unless all experts stay in memory. Raises SourceError for a model without
    experts, PackError for one that llama.cpp does not run, RequestError for a part of a pack, for
    unknown options and for too little memory, and OSError.
    """

    def __init__(
        self,
        pack: Pack,
        options: StreamingOptions,
        failed: Callable[[MoepackError], None],
        *,
        records: bool = False,
        counts: bool = False,
    ) -> None:
        self._shape = pack.shape.without_mtp().using(options.experts_used)
        """Of the layers that every program runs: few use those for multi-token prediction."""
        if not self._shape.routed:
            raise SourceError("no layer has routed experts", path=pack.path)
        pack.require_complete()
        self._pack = pack
        self._failed = failed
        self._selections: list[Selection] | None = [] if counts else None
        self._lock = threading.Lock()
        self._record = RoutingRecord(self._shape) if records else None
        self._routed_layer_count = max(1, len(self._shape.routed) - 1)
        """Without the last layer, which has only tokens with outputs."""
        self._backend = options.backend
        with ExitStack() as stack:
            self._model = map_model(pack)
            stack.callback(self._model.close)
            self._experts = ExpertTable(pack, self._model)
            choices = self._choose(pack, self._experts.slot_lengths, options)
            self._table = _shared_memory("moepack-table", self._experts.encode(choices))
            stack.callback(os.close, self._table)
            self._control = Control()
            stack.callback(self._control.close)
            self._control.set_memory(self.budget)
            wants = records or counts
            self._control.set_wants(selections=wants, always=records)
            self._stack = stack.pop_all()

    def _choose(self, pack: Pack, lengths: SlotLengths, options: StreamingOptions) -> CacheChoices:
        """Divide the memory, and choose the experts to begin with."""
        self.whole_length = sum(lengths.values())
        """The bytes that all experts would take, in whole pages."""
        routed: Any = {"family": ROUTED_FAMILY, "layers": self._shape.routed}
        pinned = pack.hottest(pack.budget_length(options.pinned or 0, "pin", **routed), **routed)
        pinned_length = sum(lengths[key] for key in pinned)
        self._divide_memory(pack.shape.using(options.experts_used), lengths, pinned_length, options)
        budget = self.budget - self._reserve
        limit = budget if self._memory is not None else budget // 2
        ends = list(accumulate(lengths[key] for key in options.most_used))
        most_used = [*options.most_used][: bisect_right(ends, limit - pinned_length)]
        warm_up = {key: options.most_used.get(key, 0.0) for key in [*pinned, *most_used]}
        self.warm_up_length = sum(lengths[key] for key in warm_up)
        """The bytes of pinned and most used experts, which a program that loads reads."""
        self.has_warm_up = len(warm_up) > len(pinned)
        """Whether a program that loads reads the experts that earlier runs used most."""
        return CacheChoices(
            options.policy,
            options.check,
            options.backend,
            self._reserve,
            pinned,
            warm_up,
            is_prepared=self._memory is not None,
            prefetches=options.prefetch,
        )

    def _divide_memory(
        self, shape: ModelShape, lengths: SlotLengths, pinned_length: int, options: StreamingOptions
    ) -> None:
        self._reserve = step_length(shape, lengths, 1)
        step = step_length(shape, lengths, options.micro_batch)
        self.floor = step + self._reserve + pinned_length
        """The least bytes for experts: of a step, of one token beside it, and pinned ones."""
        memory = memory_length(options.memory)
        self._memory: int | None = self.floor if memory == "floor" else memory
        """The bytes that were given for experts; None if they follow the free memory."""
        allowed = read_memory() if self._memory is None else self._memory
        check_memory(allowed, self.floor, options.micro_batch)
        self._beside = options.beside
        available = available_memory() - self._beside.beside
        self.is_short = self._memory is None and available < self.floor
        """Whether less memory is free than the least for experts, which they take all the same."""
        most = self.whole_length + self._reserve
        self._free = FreeMemory(self.floor, most, beside=self._beside.beside)

    def close(self) -> None:
        """Close the files; programs end within a second."""
        self._stack.close()

    @property
    def budget(self) -> int:
        """The bytes that experts may take."""
        return self._free.budget if self._memory is None else self._memory

    @property
    def parts(self) -> MemoryParts:
        """The memory of the model, by part; of programs whose options are unknown only two."""
        parts = self._beside._replace(experts=min(self.budget, self.whole_length + self._reserve))
        return parts if parts.dense is not None else parts._replace(dense=dense_length(self._pack))

    @property
    def backend(self) -> str:
        """The name of the way in which experts are read; `auto` before any program has begun."""
        if self._backend != "auto":
            return self._backend
        return _KINDS.get(self._control.reads(), "auto")

    @property
    def experts_used(self) -> int | None:
        """The most experts that a token uses in any layer; None if unknown."""
        return self._shape.experts_used

    @property
    def warm_up_progress(self) -> tuple[int, int] | None:
        """The bytes of pinned and most used experts that are in memory, and of all of them.

        None unless they are being read: before a program loads, and when it has them or computes.
        """
        lengths = [one.resident_length for one in self._control.statistics() if one.is_warming]
        return (min(sum(lengths), self.warm_up_length), self.warm_up_length) if lengths else None

    @property
    def has_served(self) -> bool:
        """Whether any process has mapped the model."""
        return self._control.has_served

    @property
    def model_path(self) -> str:
        """The path that programs open."""
        return self._model.path

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead the preloaded library to the table and the control file."""
        folder = f"/proc/{os.getpid()}/fd"
        return {
            "MOEPACK_TABLE": f"{folder}/{self._table}",
            "MOEPACK_CONTROL": f"{folder}/{self._control.descriptor}",
            "MOEPACK_MODEL": self.model_path,
        }

    @property
    def usage(self) -> ExpertUsage:
        """The experts that programs have needed so far; in any thread."""
        with self._lock:
            self._read_programs()
            every = self._control.statistics()
        return ExpertUsage(
            hit_count=sum(one.hit_count for one in every),
            miss_count=sum(one.miss_count for one in every),
            read_length=sum(one.read_length for one in every),
            read_seconds=sum(one.wait_nanoseconds for one in every) / 1e9,
            fault_count=sum(one.fault_count for one in every),
            resident_length=sum(one.slots_length for one in every),
            budget=self.budget,
            holds_all=any(one.holds_all for one in every),
            expert_length=sum(one.resident_length for one in every),
            routed_count=sum(one.routed_count for one in every) // self._routed_layer_count,
            prefetches=Prefetches(
                guessed_count=sum(one.guessed_count for one in every),
                right_count=sum(one.right_count for one in every),
                read_count=sum(one.ahead_count for one in every),
                used_count=sum(one.ahead_right_count for one in every),
                control_count=sum(one.control_count for one in every),
                control_right_count=sum(one.control_right_count for one in every),
                is_off=any(one.guesses_are_off for one in every),
            ),
            wasted_length=sum(one.wasted_length for one in every),
            draft_hit_count=sum(one.draft_hit_count for one in every),
            draft_miss_count=sum(one.draft_miss_count for one in every),
            rechecked_count=sum(one.rechecked_count for one in every),
        )

    @property
    def final_usage(self) -> ExpertUsage:
        """The usage when all programs have ended, with the memory that the last one then had."""
        usage, last = self.usage, self._control.last
        return replace(
            usage,
            resident_length=last.slots_length,
            expert_length=last.resident_length,
            holds_all=bool(last.holds_all),
        )

    @property
    def lost_count(self) -> int:
        """Selections that were not read in time: a recording lacks them."""
        with self._lock:
            return self._control.lost_count()

    def read_programs(self) -> None:
        """Read the errors and selections that programs have written; in any thread."""
        with self._lock:
            self._read_programs()

    def begin_request(self) -> None:
        """Record selections from now on as another request's; in any thread."""
        if self._record is not None:
            with self._lock:
                self._read_programs()
                self._record.request_count += 1

    def pop_calls(self, *, with_open: bool = False) -> list[Call]:
        """Return the selections since the last time, by call of the model; in any thread.

        The last call of each context may go on: it is returned `with_open` ones.
        """
        assert self._record is not None
        with self._lock:
            self._read_programs()
            return self._record.pop(with_open=with_open)

    def pop_selections(self) -> list[Selection]:
        """Return the selections of steps of few tokens since the last time; in any thread."""
        assert self._selections is not None
        with self._lock:
            self._read_programs()
            selections, self._selections = self._selections, []
            return selections

    def serve(self, ending: int, tick: Callable[[], None] = lambda: None) -> None:
        """Watch programs until the descriptor `ending` is readable; call `tick` each second."""
        next_tick = 0.0
        while True:
            if (now := time.monotonic()) >= next_tick:
                next_tick = now + _SECONDS_BETWEEN
                self._follow_memory()
                tick()
            is_ending = bool(select.select([ending], [], [], _PATIENCE)[0])
            with self._lock:
                self._read_programs()
            if is_ending:  # a program's last selections count
                return

    def _follow_memory(self) -> None:
        if self._memory is None:
            resident = sum(one.slots_length for one in self._control.statistics())
            self._control.set_memory(self._free.follow(resident, self._yet_to_take()))

    def _yet_to_take(self) -> int:
        """Return the bytes beside experts that are still free; the page cache always is."""
        programs = (self._control.holder(number) for number in self._control.live())
        own = sum(own_memory(one) for one in (os.getpid(), *programs) if one is not None)
        return (self._beside.dense or 0) + max(0, self._beside.own_length - own)

    def _read_programs(self) -> None:
        """Read selections and errors, and count the programs that have ended."""
        ended = self._control.forget_ended()
        for number in [*self._control.live(), *ended]:
            for context, selection in self._control.selections(number):
                self._on_routed((number, context), selection)
        for error in self._control.errors():
            self._failed(self._to_error(error))
        for number in ended:
            if self._record is not None:
                self._record.end(number)
            self._control.free(number)

    def _to_error(self, error: ProgramError) -> MoepackError:
        """Return what a program's cache met as the error that a reader raises for it."""
        part = None if error.expert is None else self._experts.part_of(error.expert, error.part)
        if part is None:
            return MachineError(error.problem)
        path = part.path
        if error.is_of_mirror and self._pack.mirror is not None:
            path = self._pack.mirror.path / path.name
        place = f"layer {part.layer} expert {part.expert} {part.part} at byte {part.offset:,}"
        if error.code == _DIGEST_DIFFERS:
            return digest_error(path, place, part.digest or 0, error.digest)
        if error.system_error == errno.ENODATA:
            hint = "it was cut or replaced: run `moepack verify` on the pack"
            return PackError("the file ends too early", path=path, place=place, hint=hint)
        system_error = OSError(error.system_error, os.strerror(error.system_error))
        return file_error(path, place, system_error)

    def _on_routed(self, source: tuple[int, int], selection: Selection) -> None:
        if selection.layer not in self._shape.routed:
            return  # traces and counts are of tokens, not of guesses at them
        if self._record is not None:
            self._record.add(source, selection)
        # A prompt uses most experts of a layer, and says little about the most used.
        is_counted = not selection.is_prompt and not selection.is_copied
        if self._selections is not None and is_counted:
            self._selections.append(selection)


def dense_length(pack: Pack) -> int:
    """Return the bytes of all dense tensors, but for tables of which a token reads rows."""
    return sum(one.length for one in pack.dense() if not is_row_table(one.name))


def _shared_memory(name: str, content: bytes) -> int:
    """Return the descriptor of a file in memory with `content`."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(len(content), mmap.PAGESIZE))
        with mmap.mmap(descriptor, len(content)) as memory:
            memory[:] = content
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
