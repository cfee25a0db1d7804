"""Serves the programs that run a model: maps their experts when routers select them."""

import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from moepack.common.closing import Closing
from moepack.common.errors import MoepackError, SourceError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey, ModelShape
from moepack.common.sizes import Size
from moepack.host.memory_limits import available_memory, memory_length, read_memory
from moepack.pack.reading.pack import Pack
from moepack.running.pager.budget import (
    FreeMemory,
    SlotLengths,
    check_memory,
    step_length,
    token_length,
)
from moepack.running.pager.client import Client, ProgramEndedError, Selection
from moepack.running.pager.mapped_model import map_model, slot_length
from moepack.running.pager.mapper import ExpertMapper
from moepack.running.pager.messages import Message, MessageKind, Op, encode
from moepack.running.pager.page_faults import program_refusal
from moepack.running.pager.prefetcher import Prefetcher
from moepack.running.pager.record import Call, RoutingRecord
from moepack.running.pager.resident_experts import ResidentExperts
from moepack.running.pager.shared_pages import SharedPages
from moepack.running.pager.usage import PagerUsage
from moepack.running.pager.warm_up import WarmUp, first_within
from moepack.storage.backend import Backend
from moepack.traces.caching import cache as caching

_FAILED, _FOREIGN = 1, 2
_SECONDS_BETWEEN = 1.0
"""The interval at which the free memory is looked at."""
_FEW = 16
"""Most tokens of a step that counts as decoding; one of more says little about the most used."""
_CREDENTIALS = struct.Struct("3i")


class PagerOptions(NamedTuple):
    """How experts are kept in memory.

    `memory` is the bytes for experts, in whole pages, or a text: `8GiB`, `50%` of this machine's
    memory, `floor` for the least that works; by default the free memory, from second to second. Of
    the hottest, up to `pinned` bytes (`2GiB`, `10%` of the experts) are never evicted; None leaves
    it to the counts of earlier runs. `policy` is one of `moepack.caching`'s, `backend` and `check`
    are the reader's. `micro_batch` is how many tokens programs compute at once: the experts of one
    such step have to fit. `most_used` in earlier runs, the most used first, are read while a
    program loads, as far as there is space; with `pins_most_used` the first are evicted last. A
    token uses `experts_used` in each layer, by default as many as the model states. `beside` is
    bytes that programs are yet to take beside experts, and left of the free memory.
    """

    memory: Size | None = None
    policy: str = "lru"
    pinned: Size | None = None
    backend: str | Backend = "auto"
    check: str = "first"
    micro_batch: int = 512
    most_used: Sequence[ExpertKey] = ()
    pins_most_used: bool = False
    experts_used: int | None = None
    beside: int = 0


class Pager(Closing):
    """Loads experts of `pack`, which has to stay open, into programs. A context manager.

    `failed` is called with each error for which a program could not go on. With `records`
    selections are recorded for `pop_calls`; with `counts` those of steps of few tokens are kept for
    `pop_selections`, unless all experts stay in memory. `pinning` is called with the bytes of each
    expert that is read to be pinned, and of all of them. Raises SourceError for a model without
    experts, PackError for one that llama.cpp does not run, RequestError for unknown options and for
    too little memory, MachineError and OSError.
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
        self._shape = pack.shape.without_mtp().using(options.experts_used)
        """Of the layers that every program runs: few use those for multi-token prediction."""
        if not self._shape.routed:
            raise SourceError("no layer has routed experts", path=pack.path)
        self._failed = failed
        self._selections: list[Selection] | None = [] if counts else None
        self._lock = threading.Lock()
        self._record = RoutingRecord(self._shape) if records else None
        self._routed_layers = frozenset(sorted(self._shape.routed)[:-1])
        self._routed_count = 0
        """Tokens times layers; without the last layer, which has only those with outputs."""
        self.has_served = False
        """Whether any process has mapped the model, or was kept from it by the system."""
        with ExitStack() as stack:
            self._load(stack, pack, options, pinning)
            self._listen(stack)
            stack.callback(self.disconnect)
            self._stack = stack.pop_all()

    def _load(
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
        """The backend that reads experts."""
        families = self._model.spans()
        shared = SharedPages(pack, reader, families) if self._model.image is not None else None
        spans = families[ROUTED_FAMILY]
        lengths = {key: slot_length(parts) for key, parts in spans.items()}
        self.whole_length = sum(lengths.values())
        """The bytes that all experts would take, in whole pages."""
        routed: Any = {"family": ROUTED_FAMILY, "layers": self._shape.routed}
        pinned = pack.hottest(pack.budget_length(options.pinned or 0, "pin", **routed), **routed)
        pinned_length = sum(lengths[key] for key in pinned)
        self._divide_memory(pack.shape.using(options.experts_used), lengths, pinned_length, options)
        cache = caching.make(options.policy, self._budget(), lengths, pinned)
        mtp = pack.shape.mtp_layers
        residents = ResidentExperts(reader, spans, lengths, cache, self._reserve, self._model, mtp)
        self._residents = residents
        stack.callback(residents.close)
        with residents.read(pinned) as completions:
            for key in completions:
                pinning(lengths[key], pinned_length)
        self._mapper = ExpertMapper(
            self._model, residents, shared, self._on_routed, watches_all=self._record is not None
        )
        self._warm_up = self._plan_warm_up(lengths, options)
        self._counts = max(spans).layer + 1, max(key.expert for key in spans) + 1

    def _divide_memory(
        self, shape: ModelShape, lengths: SlotLengths, pinned_length: int, options: PagerOptions
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
        self.beside = options.beside
        """The bytes that programs are yet to take beside experts, at most."""
        available = available_memory() - self.beside
        self.is_short = self._memory is None and available < self.floor
        """Whether less memory is free than the least for experts, which they take all the same."""
        most = self.whole_length + self._reserve
        self._free = FreeMemory(self.floor, most, beside=self.beside)

    def _plan_warm_up(self, lengths: SlotLengths, options: PagerOptions) -> WarmUp:
        """Plan reads while a program loads, which is yet to take memory of its own."""
        budget = self._residents.cache.budget
        limit = budget if self._memory is not None else budget // 2
        is_pinning = options.pins_most_used and options.pinned is None
        pinned_length = budget - token_length(self._shape, lengths) if is_pinning else 0
        keys = first_within(options.most_used, lengths, limit)
        return WarmUp(self._mapper, lengths, keys, pinned_length)

    def _listen(self, stack: ExitStack) -> None:
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._name = f"moepack-{os.getpid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener = stack.enter_context(listener)
        listener.bind(f"\0{self._name}")
        listener.listen()
        self._selector.register(listener, selectors.EVENT_READ)
        prefetcher = self._residents.prefetcher
        self._selector.register(prefetcher, selectors.EVENT_READ, prefetcher)

    def _on_routed(self, client: Client, context: int, selection: Selection) -> None:
        self._warm_up.end()
        if selection.layer not in self._shape.routed:
            return  # traces and counts are of tokens, not of guesses at them
        if selection.layer in self._routed_layers:
            self._routed_count += selection.token_count
        if self._record is not None:
            self._record.add(client, context, selection)
        is_decoding = selection.token_count <= _FEW and not selection.is_copied
        if self._selections is not None and is_decoding:
            self._selections.append(selection)

    def _budget(self) -> int:
        memory = self._free.budget if self._memory is None else self._memory
        return memory - self._reserve

    def close(self) -> None:
        """End all connections, and free the memory."""
        self._stack.close()

    def disconnect(self) -> None:
        """Count the last selections of all programs and end their connections; they end then."""
        with self._lock:
            for client in list(self._mapper.clients):
                self._remove(client)

    @property
    def budget(self) -> int:
        """The bytes that experts may take."""
        return self._residents.cache.budget + self._reserve

    @property
    def experts_used(self) -> int | None:
        """The most experts that a token uses in any layer; None if unknown."""
        return self._shape.experts_used

    @property
    def is_warming(self) -> bool:
        """Whether it reads experts that earlier runs used most, as no router has selected any."""
        return self._warm_up.is_due

    @property
    def model_path(self) -> str:
        """The path that programs open."""
        return self._model.path

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead the preloaded library to this pager."""
        return {"MOEPACK_PAGER": self._name, "MOEPACK_MODEL": self.model_path}

    @property
    def usage(self) -> PagerUsage:
        """The experts that programs have needed so far; in any thread."""
        with self._lock:
            self._mapper.count_selections()
            return PagerUsage(
                hit_count=self._residents.tally.hit_count,
                miss_count=self._residents.tally.miss_count,
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
        """Record selections from now on as another request's; in any thread."""
        if self._record is not None:
            with self._lock:
                self._mapper.count_selections()
                self._record.request_count += 1

    def pop_calls(self, *, with_open: bool = False) -> list[Call]:
        """Return the selections since the last time, by call of the model; in any thread.

        The last call of each context may go on: it is returned `with_open` ones.
        """
        assert self._record is not None
        with self._lock:
            self._mapper.count_selections()
            return self._record.pop(with_open=with_open)

    def pop_selections(self) -> list[Selection]:
        """Return the selections of steps of few tokens since the last time; in any thread."""
        assert self._selections is not None
        with self._lock:
            self._mapper.count_selections()
            selections, self._selections = self._selections, []
            return selections

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
                is_due = self._warm_up.is_due or self._waiting()
                events = self._selector.select(0 if is_due else next_tick - time.monotonic())
                with self._lock:
                    if not events and self._warm_up.is_due:
                        self._warm_up.advance()
                    for key, _ in events:
                        if key.fd != ending:
                            self._serve_one(key.data)
                    while clients := self._waiting():
                        for client in clients:
                            self._serve_one(client)
                if any(key.fd == ending for key, _ in events):  # a program's last messages count
                    return
        finally:
            self._selector.unregister(ending)

    def _waiting(self) -> list[Client]:
        return [client for client in self._mapper.clients if client.has_messages]

    def _follow_memory(self) -> None:
        if self._memory is None:
            self._free.follow(self._residents.length)
            self._mapper.resize(self._budget())
        self._mapper.release_evicted()

    def _serve_one(self, client: Client | Prefetcher | None) -> None:
        if client is None:
            self._accept()
        elif isinstance(client, Prefetcher):
            with suppress(MoepackError):  # demanding the experts raises the error
                client.advance()
        elif client in self._mapper.clients:  # an event before may have ended it
            try:
                for message in client.read_messages():
                    self._answer(client, message)
                if client.faults is not None:
                    self._mapper.serve_faults(client, client.faults)
                self._mapper.release_evicted()
            except (ProgramEndedError, struct.error, ValueError):
                self._remove(client)
            except MoepackError as error:  # of a page fault: it has no answer that could say so
                self._failed(error)
                self._remove(client)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(peer)
        if user != os.getuid():  # an abstract name has no permissions
            connection.close()
            return
        client = Client(connection, self._model, self._residents.pool, self._counts)
        self._mapper.clients.append(client)
        self._selector.register(client.fileno(), selectors.EVENT_READ, client)

    def _remove(self, client: Client) -> None:
        self._selector.unregister(client.fileno())
        if client.faults is not None:
            self._selector.unregister(client.faults)
        with suppress(struct.error, ValueError):  # its ring may be why it is removed
            self._mapper.count_selections()  # its last ones
        self._mapper.clients.remove(client)
        if self._record is not None:
            self._record.end(client)
        client.close()

    def _answer(self, client: Client, message: Message) -> None:
        match message.kind:
            case MessageKind.REGION:
                if client.faults is not None and not client.regions:
                    self._selector.register(client.faults, selectors.EVENT_READ, client)
                self._mapper.add_region(client, message)
                self.has_served = True
            case MessageKind.CHOSEN:
                if client.is_late:  # it goes on: its mappings are to be known
                    client.finish()
                if status := self._load_awaited(client, message):
                    client.send([encode(Op.ANSWER, expert=status, source=message.sequence)])
            case MessageKind.HALF_FULL:
                self._mapper.count_and_prefetch(client)
                if message.sequence:
                    client.send([encode(Op.ANSWER, source=message.sequence)])
            case MessageKind.CONTEXT:
                client.add_context(message)
            case MessageKind.REQUESTS:
                client.has_requests = message.number > 0
                self._mapper.stop_prefetching()
            case MessageKind.NO_FAULTS:
                self.has_served = True
                self._failed(program_refusal(message.number))
            case MessageKind.DONE:
                client.acknowledge(message)

    def _load_awaited(self, client: Client, message: Message) -> int:
        """Load the experts that a context waits for; return 0, or the status to answer."""
        selection = self._mapper.read_awaited(client, message.number)
        try:
            if selection is None:
                raise ValueError("nobody waits")
            is_ours = self._mapper.load_selection(client, selection, message.sequence)
        except MoepackError as error:
            self._failed(error)
            return _FAILED
        return 0 if is_ours else _FOREIGN
