"""Serves the programs that run a model: their experts are mapped when their routers chose them."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

from moepack.caching import cache as caching
from moepack.errors import MoepackError, SourceError
from moepack.keys import ExpertKey
from moepack.pager.client import Choice, Client, ProgramEnded
from moepack.pager.mapped_model import map_model
from moepack.pager.messages import Do, Said, Say, op
from moepack.pager.page_faults import copy_page, proceed, read_faults, wake
from moepack.pager.residents import Residents, Usage
from moepack.pager.shared_pages import SharedPages
from moepack.reading.pack import Pack
from moepack.shape import ROUTED_FAMILY
from moepack.storage.backend import Backend

_FAILED = 1


class PagerOptions(NamedTuple):
    """How experts are held in memory.

    `memory` is the bytes for experts; of the hottest, up to `pinned` bytes are never evicted.
    `policy` is one of `moepack.caching`'s, `backend` and `check` are the reader's.
    """

    memory: int
    policy: str = "lru"
    pinned: int = 0
    backend: str | Backend = "auto"
    check: str = "first"


class Pager:
    """Brings experts of `pack`, which has to stay open. A context manager.

    `failed` is called with each error for which a program could not go on. Raises SourceError for a
    model without experts, PackError for one that llama.cpp does not run, RequestError for options
    that are none, MachineError and OSError.
    """

    def __init__(
        self, pack: Pack, options: PagerOptions, failed: Callable[[MoepackError], None]
    ) -> None:
        self._failed = failed
        self._clients: dict[int, Client] = {}
        shape = pack.shape.without_mtp()
        if not shape.routed:
            raise SourceError("no layer has experts that a router chooses", path=pack.path)
        with ExitStack() as stack:
            self._model = map_model(pack)
            stack.callback(self._model.close)
            reader = stack.enter_context(pack.reader(backend=options.backend, check=options.check))
            places = self._model.places()
            self._shared = SharedPages(pack, reader, places) if self._model.image else None
            routed = places.pop(ROUTED_FAMILY)
            lengths = {key: sum(span.length for span in spans) for key, spans in routed.items()}
            pinned = pack.hottest(options.pinned, family=ROUTED_FAMILY, layers=shape.routed)
            cache = caching.make(options.policy, options.memory, lengths, pinned)
            self._residents = Residents(reader, routed, cache, ROUTED_FAMILY)
            stack.callback(self._residents.close)
            for _ in self._residents.read(pinned):
                pass
            self._layer_count = max(key.layer for key in routed) + 1
            self._expert_count = max(key.expert for key in routed) + 1
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._name = f"moepack-{os.getpid()}-{secrets.token_hex(8)}"
            self._listener = stack.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            self._listener.bind(f"\0{self._name}")
            self._listener.listen()
            self._selector.register(self._listener, selectors.EVENT_READ)
            stack.callback(self._close_clients)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _close_clients(self) -> None:
        for client in self._clients.values():
            client.close()

    @property
    def model_path(self) -> str:
        """What programs open."""
        return self._model.path

    def environment(self, library: str) -> dict[str, str]:
        """Return what is added to the environment of programs, with the preloaded library's path."""
        return {
            "LD_PRELOAD": library,
            "MOEPACK_PAGER": self._name,
            "MOEPACK_MODEL": self.model_path,
        }

    @property
    def usage(self) -> Usage:
        """What programs needed so far."""
        return self._residents.usage

    @property
    def client_count(self) -> int:
        """How many processes have the model mapped."""
        return len(self._clients)

    def serve(self, ending: int) -> None:
        """Serve programs until the descriptor `ending` is readable."""
        self._selector.register(ending, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fd == ending:
                        return
                    self._serve_one(key.fd)
        finally:
            self._selector.unregister(ending)

    def _serve_one(self, descriptor: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
            return
        client = self._clients.get(descriptor)
        if client is None:
            client = next((one for one in self._clients.values() if one.faults == descriptor), None)
            if client is not None:
                self._serve_faults(client, descriptor)
            return
        try:
            for said in client.told(wait=False):
                self._answer(client, said)
        except (ProgramEnded, struct.error, ValueError):
            self._forget(client)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            connection.close()
            return
        pool = self._residents.pool.descriptor
        counts = self._layer_count, self._expert_count
        client = Client(connection, self._model, pool, *counts)
        self._clients[client.fileno()] = client
        self._selector.register(client.fileno(), selectors.EVENT_READ)

    def _forget(self, client: Client) -> None:
        descriptor = client.fileno()
        self._selector.unregister(descriptor)
        if client.faults is not None:
            self._selector.unregister(client.faults)
        del self._clients[descriptor]
        client.close()

    def _answer(self, client: Client, said: Said) -> None:
        match said.kind:
            case Say.REGION:
                if client.faults is not None and not client.regions:
                    self._selector.register(client.faults, selectors.EVENT_READ)
                client.add_region(said)
                operations = list(self._model.prepare(said.index))
                for key in client.resident:
                    operations += self._residents.mapping(key)
                client.do([*operations, op(Do.ANSWER, source=said.sequence)])
            case Say.CHOSEN:
                self._bring_chosen(client, said)
            case Say.HALF_FULL:
                self._take_choices(None)
                if said.sequence:
                    client.do([op(Do.ANSWER, source=said.sequence)])
            case Say.DONE:
                client.count_done()
            case Say.HELLO | Say.GONE:
                pass

    def _take_choices(self, wanted: tuple[Client, int] | None) -> list[ExpertKey]:
        """Count what was chosen in all contexts; return the last choice of the context that waits.

        All others were hits: what they chose was mapped.
        """
        last: Choice | None = None
        for client in self._clients.values():
            for number, choice in client.choices():
                if wanted == (client, number):
                    if last is not None:
                        self._count(last)
                    last = choice
                else:
                    self._count(choice)
        return [] if last is None else _keys(last)

    def _count(self, choice: Choice) -> None:
        lacking = self._residents.look_up(_keys(choice))
        if lacking:
            self._residents.forget(lacking)

    def _bring_chosen(self, client: Client, said: Said) -> None:
        keys = self._take_choices((client, said.index))
        status = 0
        try:
            self._bring(client, keys)
        except MoepackError as error:
            self._failed(error)
            status = _FAILED
        client.do([op(Do.ANSWER, expert=status, source=said.sequence)])

    def _bring(self, client: Client, keys: Sequence[ExpertKey]) -> None:
        """Have experts read, and mapped by a program."""
        lacking = self._residents.look_up(keys) if keys else []
        chosen = dict.fromkeys(keys)
        self._evict([key for key in self._residents.aside if key not in chosen])
        for key in self._residents.read(lacking):
            self._map(client, [key])
        self._map(client, [key for key in chosen if key not in client.resident])

    def _map(self, client: Client, keys: Sequence[ExpertKey]) -> None:
        if keys:
            self._share_pages(client, keys)
            client.do([one for key in keys for one in self._residents.mapping(key)])
            client.resident.update(keys)

    def _share_pages(self, client: Client, keys: Sequence[ExpertKey]) -> None:
        """Put the pages there that experts share with others; they stay."""
        if self._shared is None or client.faults is None:
            return
        for key, spans in self._residents.spans(keys):
            for span, page in self._shared.edges(spans):
                part = self._residents.part(key, span.part)
                place = f"layer {key.layer} expert {key.expert}"
                self._shared.compare(span, page, part, place)
                if page not in client.shared_pages:
                    for address in client.addresses(page):
                        copy_page(client.faults, address, self._shared.page(page))
                    client.shared_pages.add(page)

    def _serve_faults(self, client: Client, descriptor: int) -> None:
        for address in read_faults(descriptor):
            offset = client.offset_of(address)
            if offset is not None:
                try:
                    self._serve_fault(client, descriptor, address, offset)
                except MoepackError as error:
                    self._failed(error)
                    client.close()

    def _serve_fault(self, client: Client, faults: int, address: int, page: int) -> None:
        """Serve a program that reads an expert which it did not announce, or that was swapped."""
        assert self._shared is not None
        parts = self._shared.on_page(page)
        self.usage.fault_count += 1
        start, end = parts[0].span.whole_pages if parts else (0, 0)
        if not start <= page < end or parts[0].family != ROUTED_FAMILY:
            copy_page(faults, address, self._shared.page(page))
        elif parts[0].key in client.resident:
            proceed(faults, address)
        else:
            self._bring(client, [parts[0].key])
            wake(faults, address)

    def _evict(self, keys: Sequence[ExpertKey]) -> None:
        """Give the slots of experts back, but for those that some program computes with."""
        refused: set[ExpertKey] = set()
        for client in list(self._clients.values()):
            mapped = [key for key in keys if key in client.resident]
            try:
                refused |= client.evict(self._residents.spans(mapped))
            except ProgramEnded:
                self._forget(client)
        self._residents.release([key for key in keys if key not in refused])


def _keys(choice: Choice) -> list[ExpertKey]:
    return [ExpertKey(choice.layer, expert) for expert in choice.experts]
