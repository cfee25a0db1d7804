"""Has programs map the experts that they chose, and none that are evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from moepack.errors import MoepackError
from moepack.keys import ExpertKey
from moepack.pager.client import Choice, Client, ProgramEndedError
from moepack.pager.mapped_model import MappedModel
from moepack.pager.messages import Do, Said, op
from moepack.pager.page_faults import copy_page, read_faults, wake
from moepack.pager.prompts import MANY, Prompts
from moepack.pager.residents import Residents
from moepack.pager.shared_pages import SharedPages
from moepack.shape import ROUTED_FAMILY


class UnknownExpertsError(Exception):
    """A router chose experts that the model does not have: it is another model's."""


class Mapper:
    """Maps experts of `residents` in the processes `clients`.

    `shared` has the pages of an image that parts share; None where programs map the shards.
    `chosen` is called with each choice, its process and context. With `watches_all` choices are
    announced even where all experts stay in memory. Methods raise what reading raises, and
    ProgramEndedError.
    """

    def __init__(
        self,
        model: MappedModel,
        residents: Residents,
        shared: SharedPages | None,
        chosen: Callable[[Client, int, Choice], None],
        *,
        watches_all: bool,
    ) -> None:
        self._model, self._residents, self._shared = model, residents, shared
        self._chosen, self._watches_all = chosen, watches_all
        self._prompts = Prompts(residents, model.position)
        self._mapped_prompt: Choice | None = None
        """What a step of many tokens chose last, where all was mapped and nothing is read ahead."""
        self.clients: list[Client] = []
        self.fault_count = 0
        """Page faults on experts that nobody had announced."""

    def enter(self, client: Client, said: Said) -> None:
        """Have a process that has just mapped a file map all of it that is resident."""
        client.add_region(said)
        client.do(list(self._model.prepare(said.number)))
        self._map(client, self._residents.of_file(said.number))
        self._watch()
        client.do([op(Do.ANSWER, source=said.sequence)])

    def count_choices(self) -> None:
        """Count what was chosen and is mapped."""
        for client in self.clients:
            for context, choice in client.choices():
                self._count(client, context, choice)

    def follow(self, client: Client) -> None:
        """Count what was chosen, and read ahead of a prompt that found all of it mapped."""
        for context, choice in client.choices():
            self._count(client, context, choice)
        if self._mapped_prompt is not None:  # maybe counted before
            self._prefetch(self._mapped_prompt)

    def take_awaited(self, client: Client, context: int) -> Choice | None:
        """Return the choice that a context waits for; count those before it."""
        awaited: Choice | None = None
        for number, choice in client.choices(context):
            if choice.is_awaited:
                awaited = choice
                self._chosen(client, number, choice)
            else:
                self._count(client, number, choice)
        return awaited

    def _count(self, client: Client, context: int, choice: Choice) -> None:
        if keys := self._keys(choice):
            self._prompts.begin_step(choice.layer, Counter(choice.experts), choice.token_count)
            self._residents.count(keys)
            if choice.token_count >= MANY:
                self._mapped_prompt = choice
        self._chosen(client, context, choice)

    def bring(self, client: Client, choice: Choice, sequence: int) -> None:
        """Have what a layer chose read, and mapped by the process; answer its request then."""
        keys = self._keys(choice)
        if not keys:
            raise UnknownExpertsError
        self._prompts.begin_step(choice.layer, Counter(choice.experts), choice.token_count)
        self._bring(client, keys, [op(Do.ANSWER, source=sequence)])
        if choice.token_count >= MANY:
            self._prefetch(choice)

    def _keys(self, choice: Choice) -> list[ExpertKey]:
        """Return the experts that a step chose, each once, in the order of their last choice.

        None where they are copies, of which nothing is brought, or another model's.
        """
        last = list(dict.fromkeys(reversed(choice.experts)))
        keys = [ExpertKey(choice.layer, expert) for expert in reversed(last)]
        is_brought = not choice.is_copied and all(key in self._residents.spans for key in keys)
        return keys if is_brought else []

    def _prefetch(self, choice: Choice) -> None:
        """Begin to read what the next layer may choose, while many tokens compute this one."""
        self._mapped_prompt = None
        choices = Counter(choice.experts)
        expected = self._prompts.expect(choice.layer, choices, choice.token_count)
        self._evict_but({ExpertKey(choice.layer, expert) for expert in choices})
        with suppress(MoepackError):  # whoever demands what did not come meets the error
            self._residents.prefetcher.begin(expected)

    def _bring(self, client: Client, keys: Sequence[ExpertKey], then: Sequence[bytes]) -> None:
        """Have experts read and mapped, and have the process do something more at last."""
        chosen = frozenset(keys)
        lacking = dict.fromkeys(self._residents.look_up(keys))
        others = [key for key in keys if key not in client.resident and key not in lacking]
        if not lacking:
            self._map(client, others, then)
        else:
            has_room = self._residents.has_room(lacking)
            if not has_room:
                self._evict_but(chosen)
            with self._residents.read(list(lacking)) as coming:
                # While the drive reads: later the program computes, and needs the processors.
                self._map(client, others)
                if has_room:
                    self._evict_but(chosen)
                for count, key in enumerate(coming, 1):
                    self._map(client, [key], then if count == len(lacking) else ())
        self._watch()

    def _evict_but(self, chosen: Container[ExpertKey]) -> None:
        self.evict([key for key in self._residents.aside if key not in chosen])

    def warm_up(self, keys: Sequence[ExpertKey]) -> None:
        """Have experts read that nothing chose, where there is room, and mapped by all."""
        lacking = self._residents.admit(keys)
        if lacking:
            waited = self._residents.read_seconds
            with self._residents.read(lacking) as coming:
                for key in coming:
                    for client in self.clients:
                        with suppress(ProgramEndedError):  # its connection says so once more
                            if client.regions:
                                self._map(client, [key])
            self._residents.read_seconds = waited  # nobody waits for these
            self._watch()

    def evict_aside(self) -> None:
        """Have nobody map what the cache has evicted, but for what is computed with."""
        if self._residents.aside:
            self.count_choices()  # what was used meanwhile is not aside any more
            self.evict(self._residents.aside)

    def resize(self, budget: int) -> None:
        """Have another budget, and evict what is beyond it."""
        if budget != self._residents.budget:
            self._residents.resize(budget)
            self._watch()
            self.evict_aside()

    def _watch(self) -> None:
        """Have choices announced, but where all experts stay in memory whatever is chosen."""
        for client in self.clients:
            holds_all = self._residents.holds_all and len(client.resident) == len(self._residents)
            is_watching = self._watches_all or not holds_all
            if client.is_watching != is_watching:
                client.is_watching = is_watching
                with suppress(ProgramEndedError):  # its connection says so once more
                    client.do([op(Do.WATCH, expert=is_watching)])

    def _map(self, client: Client, keys: Sequence[ExpertKey], then: Sequence[bytes] = ()) -> None:
        self._share_pages(client, keys)
        client.do([*(one for key in keys for one in self._residents.mapping(key)), *then])
        client.resident.update(keys)

    def evict(self, keys: Sequence[ExpertKey]) -> None:
        """Give the slots of experts back, but for those that some program computes with."""
        refused: set[ExpertKey] = set()
        for client in self.clients:
            mapped = [(key, self._residents.spans[key]) for key in keys if key in client.resident]
            try:
                refused |= client.evict(mapped)
            except ProgramEndedError:
                continue  # its memory went with it; its connection says so once more
        self._residents.release([key for key in keys if key not in refused])

    def _share_pages(self, client: Client, keys: Sequence[ExpertKey]) -> None:
        """Put the pages there that experts share with others; they stay."""
        if self._shared is None or client.faults is None:
            return
        for key in keys:
            for span, page in self._shared.edges(self._residents.spans[key]):
                part = self._residents.part(key, span.part)
                self._shared.compare(span, page, part, f"layer {key.layer} expert {key.expert}")
                if page not in client.shared_pages:
                    for address in client.addresses(page):
                        copy_page(client.faults, address, self._shared.page(page))
                    client.shared_pages.add(page)

    def serve_faults(self, client: Client, faults: int) -> None:
        """Serve a process that reads experts which it did not announce, or that were swapped.

        Raises ValueError for what it cannot have read.
        """
        assert self._shared is not None
        for address in read_faults(faults):
            page = client.offset_of(address)
            if page is None:
                raise ValueError("a page fault where no file is mapped")
            self.fault_count += 1
            parts = self._shared.on_page(page)
            start, end = parts[0].span.whole_pages if parts else (0, 0)
            if not start <= page < end or parts[0].family != ROUTED_FAMILY:
                copy_page(faults, address, self._shared.checked_page(page))
            else:
                if parts[0].key in client.resident:
                    # The system took the pages out of its tables, as where it splits huge ones.
                    self._map(client, [parts[0].key])
                else:
                    self._bring(client, [parts[0].key], ())
                client.finish()
                wake(faults, address)
