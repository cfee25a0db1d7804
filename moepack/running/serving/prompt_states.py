"""When our server saves the states of texts, and restores one for a request.

llama.cpp's server saves the text in a slot, and restores it there. A request's tokens are known
before it begins: of the saved states that with the longest common beginning is restored, if what
memory has is far shorter. llama.cpp compares the tokens again: a needless state only takes time.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeVar

import h11

from moepack.common.sizes import size_text
from moepack.running.serving.peer import Connection, fetch
from moepack.running.serving.prompt_files import (
    PromptFile,
    PromptFiles,
    common_count,
    pack_tokens,
    token_count,
)
from moepack.storage.folders import free_space

Result = TypeVar("Result")

Ask = Callable[[str, str, bytes], Awaitable[Any]]
"""Sends a method, a target and a body to the server; returns its JSON, or raises StateError."""

_LEAST = 128
"""Tokens for which something is saved or restored."""
_SHARE = 8
"""A gain is at least this fraction of the tokens that are written, read or asked."""
_UNFIT = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Errors of bodies that are no requests for texts of known tokens."""
_IDLE_SECONDS = 3.0
"""Without a request for a text, before states are saved."""


class StateError(Exception):
    """llama.cpp's server refuses a request, with its message."""


class _Saved(NamedTuple):
    """A slot when it was saved or restored: its last task, and the number of its tokens."""

    task: int | None
    token_count: int


class PromptStates:
    """Saves and restores states in `files`, by a server that `ask` asks.

    `log` is called with a sentence about what fails; requests are answered all the same.
    """

    def __init__(self, files: PromptFiles, ask: Ask, log: Callable[[str], None]) -> None:
        self._files, self._ask, self._log = files, ask, log
        self._lock = asyncio.Lock()
        self._saved: dict[int, _Saved] = {}
        self._recent: list[bytes] = []
        self._context = 0
        self._unusable: set[str] = set()
        self._text_count = 0
        self._token_length = 0
        self._timer: asyncio.TimerHandle | None = None
        self._saving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def text(self, path: bytes, body: bytes) -> AsyncIterator[None]:
        """Prepare for a request for a text, which lasts until the block ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._text_count += 1
        try:
            async with self._lock:
                with self._noting("restored"):
                    await self._prepare(path, body)
            yield
        finally:
            self._text_count -= 1
            if self._text_count == 0:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(_IDLE_SECONDS, self._begin_saving)

    def _begin_saving(self) -> None:
        self._saving = asyncio.create_task(self.save(is_last=False))

    async def save(self, *, is_last: bool = True) -> None:
        """Save all texts that nobody computes; before the last time only those that grew much."""
        async with self._lock:
            if is_last or self._text_count == 0:
                with self._noting("saved"):
                    await self._save_idle(_SHARE if not is_last else None)

    @contextlib.contextmanager
    def _noting(self, verb: str) -> Any:
        try:
            yield
        except (StateError, OSError) as error:
            self._log(f"the state of a text is not {verb}: {error}")
        except (h11.ProtocolError, ValueError, KeyError, TypeError):  # another server's words
            self._log(f"the state of a text is not {verb}: llama.cpp's server answers otherwise")

    async def _prepare(self, path: bytes, body: bytes) -> None:
        tokens = await self._tokens(path, body)
        if tokens is None:
            if not self._recent and (latest := self._files.latest()) is not None:
                await self._restore(latest)
            return
        if self._recent and not tokens.startswith(self._recent[0]):
            with self._noting("saved"):  # this text may take the place of another
                await self._save_idle(None)
        best, count = self._files.best(tokens)
        count_in_memory = max((common_count(one, tokens) for one in self._recent), default=0)
        if best is not None and best.path.name not in self._unusable:
            least = max(token_count(tokens), token_count(best.tokens)) // _SHARE
            if count - count_in_memory >= max(_LEAST, least):
                await self._restore(best)
        self._remember(tokens)

    async def _tokens(self, path: bytes, body: bytes) -> bytes | None:
        """Return the tokens of a request; None if they cannot be known."""
        with contextlib.suppress(*_UNFIT, StateError):
            if path.endswith(b"/chat/completions"):
                prompt = (await self._ask("POST", "/apply-template", body))["prompt"]
            elif path.endswith((b"/completion", b"/completions")):
                prompt = json.loads(body)["prompt"]
            else:
                return None
            if isinstance(prompt, str):
                fields = {"content": prompt, "add_special": True, "parse_special": True}
                prompt = (await self._send("/tokenize", fields))["tokens"]
            return pack_tokens(prompt)
        return None

    def _remember(self, tokens: bytes) -> None:
        """Note a text that is in memory; with the last ones of a context, llama.cpp keeps it."""
        others = [one for one in self._recent if not tokens.startswith(one)]
        ends = accumulate(map(token_count, [tokens, *others]))
        kept = [
            one
            for one, end in zip(others, islice(ends, 1, None), strict=True)
            if end <= self._context
        ]
        self._recent = [tokens, *kept]

    async def _slots(self) -> list[dict[str, Any]]:
        """Return the slots in which nothing is computed."""
        slots = await self._ask("GET", "/slots", b"")
        self._context = slots[0]["n_ctx"]
        return [slot for slot in slots if not slot["is_processing"]]

    async def _save_idle(self, share: int | None) -> None:
        """Save the slots with enough new tokens: with a `share`, one of so many."""
        for slot in await self._slots():
            count, task = slot.get("n_prompt_tokens", 0), slot.get("id_task")
            last = self._saved.get(slot["id"], _Saved(None, 0))
            fresh = count - min(last.token_count, slot.get("n_prompt_tokens_cache", 0))
            least = _LEAST if share is None else max(_LEAST, count // share)
            if fresh >= least and task != last.task:
                await self._save(slot["id"], count, task)

    async def _save(self, slot: int, count: int, task: int | None) -> None:
        self._check_space(count * self._token_length)
        partial = self._files.begin()
        try:
            answer = await self._send(f"/slots/{slot}?action=save", {"filename": partial.name})
            self._token_length = answer["n_written"] // max(1, answer["n_saved"])
            self._check_space(answer["n_written"])
            file = await _in_thread(self._files.finish, partial, answer["n_written"])
        finally:
            partial.unlink(missing_ok=True)
        self._saved[slot] = _Saved(task, count)
        if file is not None:
            self._remember(file.tokens)

    def _check_space(self, length: int) -> None:
        """Raise StateError if a state is too long."""
        most = min(self._files.limit, free_space(self._files.folder) // 2)
        if length > most:
            raise StateError(f"it takes {size_text(length)}, and may take {size_text(most)}")

    async def _restore(self, file: PromptFile) -> None:
        """Restore a state into the emptiest slot that nobody uses."""
        slots = await self._slots()
        if not slots or not await _in_thread(self._files.is_whole, file):
            return
        slot = min(slots, key=lambda one: int(one.get("n_prompt_tokens", 0)))
        target, name = f"/slots/{slot['id']}?action=restore", {"filename": file.path.name}
        try:
            try:
                await self._send(target, name)
            except StateError:  # other texts, which are saved, leave no space
                for one in slots:
                    await self._send(f"/slots/{one['id']}?action=erase", {})
                await self._send(target, name)
        except StateError:
            self._unusable.add(file.path.name)
            raise
        self._saved[slot["id"]] = _Saved(slot.get("id_task"), token_count(file.tokens))
        self._remember(file.tokens)

    async def _send(self, target: str, fields: Mapping[str, Any]) -> Any:
        return await self._ask("POST", target, json.dumps(fields).encode())


async def _in_thread(call: Callable[..., Result], *arguments: object) -> Result:
    """Return what a call returns that a thread makes, and that ends even if nobody waits for it.

    So the files are used by one at a time: whoever is cancelled keeps the lock until then.
    """
    task = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def make_asker(
    connect: Callable[[], Awaitable[Connection]], prefix: str, keys: Sequence[str]
) -> Ask:
    """Return a function that asks a server by `connect`; the server's paths begin with `prefix`."""
    fields = [(b"content-type", b"application/json")]
    fields += [(b"authorization", f"Bearer {key}".encode()) for key in keys]

    async def ask(method: str, target: str, body: bytes) -> Any:
        path = f"{prefix}{target}".encode()
        status, answer = await fetch(await connect(), method.encode(), path, fields, body)
        if status != HTTPStatus.OK:
            raise StateError(json.loads(answer)["error"]["message"])
        return json.loads(answer)

    return ask
