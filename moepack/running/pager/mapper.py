"""Maps experts into programs when routers select them, and unmaps evicted ones."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from moepack.common.errors import MoepackError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey
from moepack.running.pager.client import Client, ProgramEndedError, Selection
from moepack.running.pager.mapped_model import MappedModel
from moepack.running.pager.messages import Message, Op, encode
from moepack.running.pager.page_faults import copy_page, read_faults, wake
from moepack.running.pager.prompts import MANY, Prompts
from moepack.running.pager.resident_experts import ResidentExperts
from moepack.running.pager.shared_pages import SharedPages


class ExpertMapper:
    """Maps experts of `residents` in the processes `clients`.

    `shared` has the pages of an image that parts share; None if programs map the shards.
    `on_routed` is called with each selection, its process and context. With `watches_all`
    selections are announced even if all experts stay in memory. Methods raise what reading raises,
    and ProgramEndedError.
    """

    def __init__(
        self,
        model: MappedModel,
        residents: ResidentExperts,
        shared: SharedPages | None,
        on_routed: Callable[[Client, int, Selection], None],
        *,
        watches_all: bool,
    ) -> None:
        self._model, self.residents, self._shared = model, residents, shared
        self._on_routed, self._watches_all = on_routed, watches_all
        self._prompts = Prompts(residents, model.position)
        self._mapped_prompt: Selection | None = None
        """The last step of many tokens with mapped experts: nothing was prefetched yet."""
        self.clients: list[Client] = []
        self.fault_count = 0
        """Page faults on experts that were not announced."""

    def add_region(self, client: Client, message: Message) -> None:
        """Map the resident experts of a file that a process has just mapped."""
        client.add_region(message)
        client.send(list(self._model.prepare(message.number)))
        self._map(client, self.residents.of_file(message.number))
        self._set_watching()
        client.send([encode(Op.ANSWER, source=message.sequence)])

    def count_selections(self) -> None:
        """Count the selections of mapped experts."""
        for client in self.clients:
            for context, selection in client.read_selections():
                self._count(client, context, selection)

    def count_and_prefetch(self, client: Client) -> None:
        """Count the selections of a process, and prefetch for a prompt that had all mapped."""
        for context, selection in client.read_selections():
            self._count(client, context, selection)
        if self._mapped_prompt is not None:  # maybe counted before
            self._prefetch(client, self._mapped_prompt)

    def read_awaited(self, client: Client, context: int) -> Selection | None:
        """Return the selection that a context waits for; count those before it."""
        awaited: Selection | None = None
        for number, selection in client.read_selections(context):
            if selection.is_awaited:
                awaited = selection
                self._on_routed(client, number, selection)
            else:
                self._count(client, number, selection)
        return awaited

    def _count(self, client: Client, context: int, selection: Selection) -> None:
        if keys := self._keys(selection):
            self._begin_step(selection)
            self.residents.count_mapped(keys)
            if selection.token_count >= MANY:
                self._mapped_prompt = selection
        self._on_routed(client, context, selection)

    def load_selection(self, client: Client, selection: Selection, sequence: int) -> bool:
        """Read and map the experts of a selection; answer the request of the process then.

        Returns whether the model has these experts: else the router is another model's.
        """
        keys = self._keys(selection)
        if not keys:
            return False
        self._begin_step(selection)
        self._load(client, keys, [encode(Op.ANSWER, source=sequence)])
        if selection.token_count >= MANY:
            self._prefetch(client, selection)
        return True

    def _begin_step(self, selection: Selection) -> None:
        counts = Counter(selection.experts)
        self._prompts.begin_step(selection.layer, counts, selection.token_count)

    def _keys(self, selection: Selection) -> list[ExpertKey]:
        """Return the experts of a step, each once, in the order of their last selection.

        None if they are copies, which are never loaded, or another model's.
        """
        last = list(dict.fromkeys(reversed(selection.experts)))
        keys = [ExpertKey(selection.layer, expert) for expert in reversed(last)]
        is_ours = not selection.is_copied and all(key in self.residents.spans for key in keys)
        return keys if is_ours else []

    def _prefetch(self, client: Client, selection: Selection) -> None:
        """Begin to read experts of the next layer, while many tokens compute this one.

        Not for a prompt that nobody waits for: a server computes it to the end of its micro-batch.
        """
        self._mapped_prompt = None
        if not client.has_requests:
            return
        counts = Counter(selection.experts)
        likely = self._prompts.predict(selection.layer, counts, selection.token_count)
        self._evict_but({ExpertKey(selection.layer, expert) for expert in counts})
        with suppress(MoepackError):  # demanding them raises the error
            self.residents.prefetcher.begin(likely)

    def stop_prefetching(self) -> None:
        """Stop to read ahead if nobody waits for any process."""
        if not any(client.has_requests for client in self.clients):
            self.residents.prefetcher.keep_only(())
            self.residents.prefetch_length = 0

    def _load(self, client: Client, keys: Sequence[ExpertKey], then: Sequence[bytes]) -> None:
        """Read and map experts; send operations `then` at last.

        Before them the process gets to know whether it goes on to announce selections.
        """
        routed = frozenset(keys)
        missing = dict.fromkeys(self.residents.look_up(keys))
        others = [key for key in keys if key not in client.resident and key not in missing]
        if not missing:
            self._map(client, others)
        else:
            has_space = self.residents.has_space(missing)
            if not has_space:
                self._evict_but(routed)
            with self.residents.read(list(missing)) as completions:
                # While the drive reads: later the program computes, and needs the processors.
                self._map(client, others)
                if has_space:
                    self._evict_but(routed)
                for key in completions:
                    self._map(client, [key])
        self._set_watching()
        client.send(then)

    def _evict_but(self, kept: Container[ExpertKey]) -> None:
        self.evict([key for key in self.residents.evicted if key not in kept])

    def warm_up(self, keys: Sequence[ExpertKey]) -> None:
        """Read unused experts as far as there is space, and map them in all processes."""
        missing = self.residents.admit(keys)
        if missing:
            seconds = self.residents.read_seconds
            with self.residents.read(missing) as completions:
                for key in completions:
                    for client in self.clients:
                        with suppress(ProgramEndedError):  # its connection says so once more
                            if client.regions:
                                self._map(client, [key])
            self.residents.read_seconds = seconds  # nobody waits for these
            self._set_watching()

    def release_evicted(self) -> None:
        """Unmap the experts that the cache has evicted, but for those in use."""
        if self.residents.evicted:
            self.count_selections()  # experts that were used meanwhile are not evicted any more
            self.evict(self.residents.evicted)

    def resize(self, budget: int) -> None:
        """Set another budget, and evict the experts beyond it."""
        if budget != self.residents.cache.budget:
            self.residents.resize(budget)
            self._set_watching()
            self.release_evicted()

    def _set_watching(self) -> None:
        """Ask programs to announce selections, unless all experts stay in memory."""
        for client in self.clients:
            holds_all = self.residents.holds_all and len(client.resident) == len(self.residents)
            is_watching = self._watches_all or not holds_all
            if client.is_watching != is_watching:
                client.is_watching = is_watching
                with suppress(ProgramEndedError):  # its connection says so once more
                    client.send([encode(Op.WATCH, expert=is_watching)])

    def _map(self, client: Client, keys: Sequence[ExpertKey]) -> None:
        self._copy_shared_pages(client, keys)
        client.send([one for key in keys for one in self.residents.mapping(key)])
        client.resident.update(keys)

    def evict(self, keys: Sequence[ExpertKey]) -> None:
        """Unmap experts and release their slots, but for those in use."""
        refused: set[ExpertKey] = set()
        for client in self.clients:
            mapped = [(key, self.residents.spans[key]) for key in keys if key in client.resident]
            with suppress(ProgramEndedError):  # its memory went with it; it says so once more
                refused |= client.evict(mapped)
        self.residents.release([key for key in keys if key not in refused])

    def _copy_shared_pages(self, client: Client, keys: Sequence[ExpertKey]) -> None:
        """Copy the pages that experts share with others into a process, where they stay."""
        if self._shared is None or client.faults is None:
            return
        for key in keys:
            for span, page in self._shared.edges(self.residents.spans[key]):
                part = self.residents.part(key, span.part)
                self._shared.compare(span, page, part, f"layer {key.layer} expert {key.expert}")
                if page not in client.shared_pages:
                    for address in client.addresses(page):
                        copy_page(client.faults, address, self._shared.page(page))
                    client.shared_pages.add(page)

    def serve_faults(self, client: Client, faults: int) -> None:
        """Serve page faults on experts that were not announced, or that were swapped.

        Raises ValueError for an address that has no file.
        """
        assert self._shared is not None
        for address in read_faults(faults):
            page = client.offset_of(address)
            if page is None:
                raise ValueError("a page fault where no file is mapped")
            self.fault_count += 1
            parts = self._shared.parts_on(page)
            start, end = parts[0].span.whole_pages if parts else (0, 0)
            if not start <= page < end or parts[0].family != ROUTED_FAMILY:
                copy_page(faults, address, self._shared.checked_page(page))
            else:
                if parts[0].key in client.resident:
                    # The system took the pages out of its tables, as when it splits huge ones.
                    self._map(client, [parts[0].key])
                else:
                    self._load(client, [parts[0].key], ())
                client.finish()
                wake(faults, address)
