"""Serves the programs that run a model: their experts are mapped when their routers chose them."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from moepack.caching import cache as caching
from moepack.errors import MoepackError, SourceError
from moepack.machine.memory_limits import available_memory, memory_length
from moepack.pager.budget import FreeMemory, Rooms, check_memory, step_length, token_length
from moepack.pager.client import Choice, Client, ProgramEndedError
from moepack.pager.mapped_model import map_model, slot_room
from moepack.pager.mapper import Mapper, UnknownExpertsError
from moepack.pager.messages import Do, Said, Say, op
from moepack.pager.prefetcher import Prefetcher
from moepack.pager.record import Call, ChoiceRecord
from moepack.pager.residents import Residents
from moepack.pager.shared_pages import SharedPages
from moepack.pager.warm_up import MostUsed, WarmUp, first_within
from moepack.reading.pack import Pack
from moepack.shape import ROUTED_FAMILY, ModelShape
from moepack.sizes import Size
from moepack.storage.backend import Backend

_FAILED, _FOREIGN = 1, 2
_SECONDS_BETWEEN = 1.0
"""How often it looks at what memory is free."""
_FEW = 16
"""Tokens of a step that are taken for decoding, of several texts maybe; a prompt's step of more
uses most experts, and says little of what is used most."""
_CREDENTIALS = struct.Struct("3i")


class PagerOptions(NamedTuple):
    """How experts are held in memory.

    `memory` is the bytes for experts, in whole pages, or a text: `8GiB`, `50%` of this machine's
    memory, `floor` for the least that works; by default what is free, from second to second. Of the
    hottest, up to `pinned` bytes (`2GiB`, `10%` of the experts) are never evicted; None leaves it
    to what was learned. `policy` is one of `moepack.caching`'s, `backend` and `check` are the
    reader's. `micro_batch` is how many tokens programs compute at once: the experts of one such
    step have to fit. `most_used` are read before any is chosen, as far as there is room.
    """

    memory: Size | None = None
    policy: str = "lru"
    pinned: Size | None = None
    backend: str | Backend = "auto"
    check: str = "first"
    micro_batch: int = 512
    most_used: MostUsed = MostUsed(())


@dataclass(frozen=True, slots=True)
class PagerUsage:
    """What programs needed so far.

    Lookups are counted where they are announced: not while all experts stay in memory, which
    `holds_all` says of now. `fault_count` are page faults on experts that nobody announced.
    `resident_length` is memory that is taken, in whole pages, `expert_length` the experts in it.
    `routed_count` is tokens that were routed: of one that half of the layers have computed it is
    one half. Lengths are bytes.
    """

    hit_count: int
    miss_count: int
    read_length: int
    read_seconds: float
    fault_count: int
    resident_length: int
    budget: int
    holds_all: bool
    expert_length: int
    routed_count: int


class Pager:
    """Brings the experts of `pack`, which has to stay open. A context manager.

    `failed` is called with each error for which a program could not go on. With `records` it keeps
    what is chosen, until it is taken; with `counts` what steps of few tokens choose, but where all
    experts stay in memory. `pinning` is called with the bytes of each expert that is read to be
    pinned, and of all of them. Raises SourceError for a model without experts, PackError for
    one that llama.cpp does not run, RequestError for options that are none and for too little
    memory, MachineError and OSError.
    """

    def __init__(
        self,
        pack: Pack,
        options: PagerOptions,
        failed: Callable[[MoepackError], None],
        *,
        records: bool = False,
        counts: bool = False,
        pinning: Callable[[int, int], None] = lambda length, total: None,
    ) -> None:
        self._failed = failed
        self._uses: list[Choice] | None = [] if counts else None
        self._lock = threading.Lock()
        self._record = ChoiceRecord(pack.shape.without_mtp()) if records else None
        self._memory: int | None = None
        """The bytes that were given for experts; None where they follow what is free."""
        self._routed_count = 0
        """Tokens times layers; without the last layer, which has only those with outputs."""
        self.has_served = False
        """Whether any process has mapped the model."""
        if not pack.shape.without_mtp().routed:
            raise SourceError("no layer has experts that a router chooses", path=pack.path)
        with ExitStack() as stack:
            self._open(stack, pack, options, pinning)
            self._stack = stack.pop_all()

    def _open(
        self,
        stack: ExitStack,
        pack: Pack,
        options: PagerOptions,
        pinning: Callable[[int, int], None],
    ) -> None:
        self._model = map_model(pack)
        stack.callback(self._model.close)
        reader = stack.enter_context(pack.reader(backend=options.backend, check=options.check))
        self.backend = reader.backend
        """The backend by which experts are read."""
        places = self._model.places()
        shared = SharedPages(pack, reader, places) if self._model.image is not None else None
        spans = places[ROUTED_FAMILY]
        rooms = {key: slot_room(parts) for key, parts in spans.items()}
        shape = pack.shape.without_mtp()
        chosen: Any = {"family": ROUTED_FAMILY, "layers": shape.routed}
        pinned = pack.hottest(pack.budget_length(options.pinned or 0, "pin", **chosen), **chosen)
        pinned_length = sum(rooms[key] for key in pinned)
        self._divide_memory(shape, rooms, pinned_length, options)
        self.whole_length = sum(rooms.values())
        """The bytes that all experts would take, in whole pages."""
        cache = caching.make(options.policy, self._budget(), rooms, pinned)
        self._residents = Residents(reader, spans, rooms, cache, self._reserve, self._model)
        stack.callback(self._residents.close)
        with self._residents.read(pinned) as coming:
            for key in coming:
                pinning(rooms[key], pinned_length)
        watches_all = self._record is not None
        self._mapper = Mapper(
            self._model, self._residents, shared, self._add_choice, watches_all=watches_all
        )
        self._warm_up = self._plan_warm_up(shape, rooms, options)
        self._routed_layers = frozenset(sorted(shape.routed)[:-1])
        self._counts = max(spans)[0] + 1, max(key.expert for key in spans) + 1
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._name = f"moepack-{os.getpid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener = stack.enter_context(listener)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(
            self._residents.prefetcher, selectors.EVENT_READ, self._residents.prefetcher
        )
        stack.callback(self.disconnect)

    def _divide_memory(
        self, shape: ModelShape, rooms: Rooms, pinned_length: int, options: PagerOptions
    ) -> None:
        step = step_length(shape, rooms, options.micro_batch)
        self._reserve = step_length(shape, rooms, 1)
        self.floor = least = step + self._reserve + pinned_length
        """The least bytes for experts: of a step, of one token beside it, and what is pinned."""
        memory = memory_length(options.memory)
        self._memory = least if memory == "floor" else memory
        given = available_memory() if self._memory is None else self._memory
        check_memory(given, least, options.micro_batch)
        self._free = FreeMemory(least, sum(rooms.values()) + self._reserve)

    def _plan_warm_up(self, shape: ModelShape, rooms: Rooms, options: PagerOptions) -> WarmUp:
        """Plan what is read while a program loads, which is yet to take memory of its own."""
        budget = self._residents.budget
        limit = budget if self._memory is not None else budget // 2
        is_pinning = options.most_used.is_pinning and options.pinned is None
        pinned_length = budget - token_length(shape, rooms) if is_pinning else 0
        keys = first_within(options.most_used.keys, rooms, limit)
        return WarmUp(self._mapper, self._residents, rooms, keys, pinned_length)

    def _add_choice(self, client: Client, context: int, choice: Choice) -> None:
        self._warm_up.end()
        if choice.layer in self._routed_layers:
            self._routed_count += choice.token_count
        if self._record is not None:
            self._record.add(client, context, choice)
        if self._uses is not None and choice.token_count <= _FEW and not choice.is_copied:
            self._uses.append(choice)

    def _budget(self) -> int:
        memory = self._free.budget if self._memory is None else self._memory
        return memory - self._reserve

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def disconnect(self) -> None:
        """End the connections to all programs; these end then."""
        for client in self._mapper.clients:
            client.close()

    @property
    def budget(self) -> int:
        """The bytes that experts may take."""
        return self._residents.budget + self._reserve

    @property
    def is_warming(self) -> bool:
        """Whether it reads experts that runs before have used most, as nothing was chosen yet."""
        return self._warm_up.is_due

    @property
    def model_path(self) -> str:
        """What programs open."""
        return self._model.path

    @property
    def environment(self) -> dict[str, str]:
        """By these variables the preloaded library knows what it is for."""
        return {"MOEPACK_PAGER": self._name, "MOEPACK_MODEL": self.model_path}

    @property
    def usage(self) -> PagerUsage:
        """What programs needed so far; to be asked in any thread."""
        with self._lock:
            self._mapper.count_choices()
            return self._usage()

    def _usage(self) -> PagerUsage:
        tally = self._residents.tally
        return PagerUsage(
            hit_count=tally.hit_count,
            miss_count=tally.miss_count,
            read_length=self._residents.read_length,
            read_seconds=self._residents.read_seconds,
            fault_count=self._mapper.fault_count,
            resident_length=self._residents.length,
            budget=self.budget,
            holds_all=self._residents.holds_all,
            expert_length=self._residents.expert_length,
            routed_count=self._routed_count // max(1, len(self._routed_layers)),
        )

    def begin_request(self) -> None:
        """Take that what is chosen from now on belongs to another request; in any thread."""
        if self._record is not None:
            with self._lock:
                self._mapper.count_choices()
                self._record.request_count += 1

    def take_calls(self, *, with_open: bool = False) -> list[Call]:
        """Take what was chosen since the last time, by call of the model; in any thread.

        Of each context the last call may go on: it is taken `with_open` ones.
        """
        assert self._record is not None
        with self._lock:
            self._mapper.count_choices()
            return self._record.take(with_open=with_open)

    def take_uses(self) -> list[Choice]:
        """Take what steps of few tokens chose since the last time; in any thread."""
        assert self._uses is not None
        with self._lock:
            self._mapper.count_choices()
            uses, self._uses = self._uses, []
            return uses

    def serve(self, ending: int, tick: Callable[[], None] = lambda: None) -> None:
        """Serve programs until the descriptor `ending` is readable; call `tick` each second."""
        self._selector.register(ending, selectors.EVENT_READ)
        next_tick = 0.0
        try:
            while True:
                if (now := time.monotonic()) >= next_tick:
                    next_tick = now + _SECONDS_BETWEEN
                    with self._lock:
                        self._follow_memory()
                    tick()
                is_due = self._warm_up.is_due or any(
                    client.has_messages for client in self._mapper.clients
                )
                events = self._selector.select(0 if is_due else next_tick - time.monotonic())
                if any(key.fd == ending for key, _ in events):
                    return
                with self._lock:
                    if not events and self._warm_up.is_due:
                        self._warm_up.advance()
                    for key, _ in events:
                        self._serve_one(key.data)
                    while waiting := [one for one in self._mapper.clients if one.has_messages]:
                        for client in waiting:
                            self._serve_one(client)
        finally:
            self._selector.unregister(ending)

    def _follow_memory(self) -> None:
        if self._memory is None:
            self._free.follow(self._residents.length)
            self._mapper.resize(self._budget())
        self._mapper.evict_aside()

    def _serve_one(self, client: Client | Prefetcher | None) -> None:
        if client is None:
            self._accept()
        elif isinstance(client, Prefetcher):
            with suppress(MoepackError):  # whoever demands what did not come meets the error
                client.advance()
        elif client in self._mapper.clients:  # an event before may have ended it
            try:
                for said in client.told():
                    self._answer(client, said)
                if client.faults is not None:
                    self._mapper.serve_faults(client, client.faults)
                self._mapper.evict_aside()
            except (ProgramEndedError, struct.error, ValueError):
                self._forget(client)
            except MoepackError as error:  # of a page fault, which nobody can be told of
                self._failed(error)
                self._forget(client)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.getuid():  # an abstract name has no permissions
            connection.close()
            return
        client = Client(connection, self._model, self._residents.pool, self._counts)
        self._mapper.clients.append(client)
        self._selector.register(client.fileno(), selectors.EVENT_READ, client)

    def _forget(self, client: Client) -> None:
        self._selector.unregister(client.fileno())
        if client.faults is not None:
            self._selector.unregister(client.faults)
        with suppress(struct.error, ValueError):  # its ring may be what it was left for
            self._mapper.count_choices()  # what it chose last
        self._mapper.clients.remove(client)
        if self._record is not None:
            self._record.end(client)
        client.close()

    def _answer(self, client: Client, said: Said) -> None:
        match said.kind:
            case Say.REGION:
                if client.faults is not None and not client.regions:
                    self._selector.register(client.faults, selectors.EVENT_READ, client)
                self._mapper.enter(client, said)
                self.has_served = True
            case Say.CHOSEN:
                if client.is_late:  # it goes on: what it does not map any more is to be known
                    client.finish()
                if status := self._bring(client, said):
                    client.do([op(Do.ANSWER, expert=status, source=said.sequence)])
            case Say.HALF_FULL:
                self._mapper.follow(client)
                if said.sequence:
                    client.do([op(Do.ANSWER, source=said.sequence)])
            case Say.CONTEXT:
                client.add_context(said)
            case Say.DONE:
                client.take_done(said)

    def _bring(self, client: Client, said: Said) -> int:
        """Bring what a context waits for; return why not, 0 where it was answered."""
        choice = self._mapper.take_awaited(client, said.number)
        try:
            if choice is None:
                raise ValueError("nobody waits")
            self._mapper.bring(client, choice, said.sequence)
        except UnknownExpertsError:
            return _FOREIGN
        except MoepackError as error:
            self._failed(error)
            return _FAILED
        return 0
