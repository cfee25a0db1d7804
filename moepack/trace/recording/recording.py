"""Record a trace: run a model on prompts, and keep what its routers chose."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

from moepack import digest
from moepack.errors import RequestError
from moepack.packing.opening import open_model
from moepack.programs.calls import memory_limit
from moepack.programs.trace_writer import origin_of_pack
from moepack.reading.directory import named_pack
from moepack.source.shards import open_source
from moepack.trace.file import CUT
from moepack.trace.file_records import encode_origin, join
from moepack.trace.file_writer import Writer, check_target
from moepack.trace.model import Item, Origin, Tokens
from moepack.trace.recording.paged import PagedRecorder
from moepack.trace.recording.prompts import read_prompts
from moepack.trace.recording.recorder import Recorder, origin_of
from moepack.trace.summary import TraceCounter, TraceSummary


class _Options(NamedTuple):
    """What a recording depends on, beside the model and the prompts."""

    tokens: int
    context: int
    temperature: float
    seed: int
    repack: bool

    def name_of(self, prompts: Sequence[str]) -> str:
        """Return what tells the recording of these prompts from others."""
        return digest.to_text(digest.of(json.dumps([prompts, self]).encode()))


def record_trace(
    model: str | os.PathLike[str],
    prompts: str | os.PathLike[str] | Sequence[str],
    target: str | os.PathLike[str],
    *,
    append: bool = False,
    resume: bool = False,
    force: bool = False,
    tokens: int = 128,
    context: int = 4096,
    threads: int | None = None,
    temperature: float = 0.8,
    seed: int = 0,
    repack: bool = True,
    memory: int | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TraceSummary:
    """Run `model` on each prompt, and on up to `tokens` tokens after it; write what was chosen.

    `model` is any shard of a GGUF, or a pack. With `memory`, bytes for experts or a text such as
    `8GiB` or `floor`, and of a pack always, llama.cpp runs in a process of its own and experts are
    read when they are chosen; then nothing is repacked.

    `prompts` are texts, or the path of a file of them (`prompts.read_prompts`). Each is a request
    of its own, and is kept when it is through: a process that is killed, interrupted, or out of
    space loses the request that it is at, no more; the exception has a note of how many are kept.
    With `resume`, the same call records the prompts that are missing, and begins where there is no
    file. `progress` is called with how many tokens are done since the last call, and with how many
    there are at most. For `temperature` and `seed` see `Recorder.generate`, for `repack` see
    `Recorder`. Raises what `Recorder`, `PagedRecorder` and `Writer` raise, and RequestError, before
    anything is run, for a prompt that is longer than the context, where `target` exists and none of
    `append`, `resume` and `force` is given, and for a file to resume that is another recording's.
    """
    path = os.fspath(target)
    _check_target(path, append, resume, force)
    texts = read_prompts(os.fspath(prompts)) if isinstance(prompts, str | os.PathLike) else prompts
    whole, added, done = TraceCounter(), TraceCounter(), _Done()
    with (
        _Model(os.fspath(model), memory, repack) as source,
        Writer(path, append=append, resume=resume) as writer,
    ):
        options = _Options(tokens, context, temperature, seed, source.repack)
        origin = replace(source.origin, recording=options.name_of(texts))
        for item in writer.held_items():
            whole.add(item)
            done.add(item)
        first = done.expect(origin, path) if resume else 0

        def add(item: Item) -> None:
            for taker in (writer, whole, added):
                taker.add(item)

        if not (resume and done.origin):
            add(origin)
        try:
            if first < len(texts):
                with source.recorder(context, threads) as recorder:
                    run = _Run(recorder, _tokenize(recorder, texts), options, progress)
                    for piece in run.requests(first):
                        add(piece)
                        writer.keep()
        except BaseException as error:
            if count := first + added.totals.request_count:
                kept = f"{count} of {len(texts)} prompts are kept in {writer.path}"
                error.add_note(f"{kept}; --resume records the others")
            raise
    left_out = [CUT] * (writer.was_cut and not resume)
    return whole.summary(path, added.totals, Counter(left_out))


class _Model:
    """What is recorded: in this process, or, of a pack or with a limit of memory, in another."""

    def __init__(self, path: str, memory: int | str | None, repack: bool) -> None:
        self._path = path
        self._memory = memory_limit(memory)
        is_paged = memory is not None or named_pack(path) is not None
        self._pack = open_model(path) if is_paged else None
        self.repack = repack and not is_paged
        if self._pack is None:
            self.origin = origin_of(open_source([path]))
        else:
            self.origin = origin_of_pack(self._pack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pack is not None:
            self._pack.close()

    def recorder(self, context: int, threads: int | None) -> Recorder | PagedRecorder:
        options: Any = {"context_length": context, "threads": threads}
        if self._pack is None:
            return Recorder(self._path, repack=self.repack, **options)
        return PagedRecorder(self._pack, self._memory, **options)


class _Done:
    """Notices what a file holds already of the recording that is to go on."""

    def __init__(self) -> None:
        self.origin: Origin | None = None
        self._request_count = 0

    def add(self, item: Item) -> None:
        """Take the next piece of the file."""
        if isinstance(item, Origin):
            self.origin, self._request_count = item, 0
        elif isinstance(item, Tokens):
            self._request_count = int(item.request[-1]) + 1

    def expect(self, origin: Origin, path: str) -> int:
        """Return how many prompts are done. Raises RequestError for another recording."""
        if self.origin is not None and encode_origin(self.origin) != encode_origin(origin):
            problem = "what was recorded last is of other prompts or options, or another model"
            hint = "--append adds another recording to it"
            raise RequestError(problem, path=path, hint=hint)
        return self._request_count


class _Run:
    """Runs a model on prompts, and tells how many tokens are done."""

    def __init__(
        self,
        recorder: Recorder | PagedRecorder,
        prompts: Sequence[Sequence[int]],
        options: _Options,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._recorder = recorder
        self._prompts = prompts
        self._options = options
        self._progress = progress

    def requests(self, first: int) -> Iterator[Tokens]:
        """Yield what was chosen for each prompt, from number `first` on."""
        options = self._options
        total = sum(map(self._most_tokens, self._prompts[first:]))
        for number, prompt in enumerate(self._prompts[first:], start=first):
            pieces = []
            for piece in self._recorder.generate(
                prompt,
                options.tokens,
                request=number,
                temperature=options.temperature,
                seed=options.seed,
            ):
                pieces.append(piece)
                self._advance(len(piece.request), total)
            request = join(pieces)
            total -= self._most_tokens(prompt) - len(request.request)
            yield request
            self._advance(0, total)

    def _most_tokens(self, prompt: Sequence[int]) -> int:
        return min(len(prompt) + self._options.tokens, self._options.context)

    def _advance(self, count: int, total: int) -> None:
        if self._progress is not None:
            self._progress(count, total)


def _check_target(path: str, append: bool, resume: bool, force: bool) -> None:
    if append and resume:
        problem = "to append and to resume at once"
        hint = "--resume goes on with a recording, --append begins another in the same file"
        raise RequestError(problem, path=path, hint=hint)
    try:
        check_target(path, append=append or resume, force=force)
    except RequestError as error:
        if error.hint is not None:
            error.hint += ", --resume records the prompts that are missing"
        raise


def _tokenize(recorder: Recorder | PagedRecorder, prompts: Sequence[str]) -> list[list[int]]:
    requests = [recorder.tokenize(prompt) for prompt in prompts]
    for number, tokens in enumerate(requests, start=1):
        if not 0 < len(tokens) <= recorder.context_length:
            raise RequestError(
                f"prompt {number} does not fit into the context",
                expected=f"1 to {recorder.context_length} tokens",
                found=len(tokens),
                hint="--context makes it longer",
            )
    return requests
