"""Record a trace: run a model on prompts, and write the experts of each token."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from moepack.common import digest
from moepack.common.errors import RequestError
from moepack.common.sizes import Size
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.directory import named_pack
from moepack.planning.machine.memory_limits import memory_length
from moepack.running.programs.trace_writer import origin_of
from moepack.running.recording.paged import PagedRecorder
from moepack.running.recording.prompts import read_prompts
from moepack.running.recording.recorder import Recorder
from moepack.traces.file import CUT
from moepack.traces.file_records import encode_origin, join
from moepack.traces.file_writer import Writer, check_target
from moepack.traces.model import Item, Origin, Tokens
from moepack.traces.summary import TraceCounter, TraceSummary


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
    memory: Size | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TraceSummary:
    """Run `model` on each prompt, and on up to `tokens` tokens after it; write the trace.

    `model` is any shard of a GGUF, or a pack. With `memory`, bytes for experts or a text such as
    `8GiB` or `floor`, and always for a pack, llama.cpp runs in a process of its own and experts are
    read when they are selected; then nothing is repacked.

    `prompts` are texts, or the path of a file of them (`prompts.read_prompts`). Each is a request
    of its own, and is kept when it is finished: a process that is killed, interrupted, or out of
    space only loses the current request; the exception has a note with the number of kept ones.
    With `resume`, the same call records the prompts that are missing, or all if there is no file.
    `progress` is called with the number of tokens since the last call, and with their maximum. For
    `temperature` and `seed` see `Recorder.generate`, for `repack` see `Recorder`. Raises what
    `Recorder`, `PagedRecorder` and `Writer` raise, and RequestError, before anything is run, for a
    prompt that is longer than the context, if `target` exists and none of `append`, `resume` and
    `force` is given, and for a file to resume that is another recording's.
    """
    path = os.fspath(target)
    _check_target(path, append, resume, force)
    texts = read_prompts(os.fspath(prompts)) if isinstance(prompts, str | os.PathLike) else prompts
    memory = memory_length(memory)
    is_paged = memory is not None or named_pack(model) is not None
    repack = repack and not is_paged
    with open_model(model) as pack, Writer(path, append=append, resume=resume) as writer:
        pack.require_files()
        options = [tokens, context, temperature, seed, repack]
        name = digest.to_text(digest.xxh3(json.dumps([texts, options]).encode()))
        recording = _Recording(writer, replace(origin_of(pack), recording=name), resume)
        with recording.noted(len(texts)):
            if recording.request_count < len(texts):
                if is_paged:
                    kind: Any = partial(PagedRecorder, pack, memory)
                else:
                    kind = partial(Recorder, os.fspath(model), repack=repack)
                with kind(context_length=context, threads=threads) as recorder:
                    sampling = {"temperature": temperature, "seed": seed}
                    first = recording.request_count
                    for request in _record(recorder, texts, first, tokens, progress, sampling):
                        recording.add(request)
    return recording.summary()


class _Recording:
    """The requests of one recording in a trace, with the file's earlier ones.

    With `resume` it goes on with the file's last recording. Raises RequestError if that has another
    origin.
    """

    def __init__(self, writer: Writer, origin: Origin, resume: bool) -> None:
        self._writer, self._resumes = writer, resume
        self._whole, self._added = TraceCounter(), TraceCounter()
        self.request_count = 0
        """Finished requests."""
        last: Origin | None = None
        for item in writer.held_items():
            self._whole.add(item)
            if isinstance(item, Origin):
                last = item
                self.request_count = 0
            elif isinstance(item, Tokens):
                self.request_count = int(item.request[-1]) + 1
        if not resume or last is None:
            self.request_count = 0
            self._add(origin)
        elif encode_origin(last) != encode_origin(origin):
            problem = "the last recording has other prompts or options, or another model"
            hint = "`append=True` adds another recording to it"
            raise RequestError(problem, path=writer.path, hint=hint)

    def _add(self, item: Item) -> None:
        for taker in (self._writer, self._whole, self._added):
            taker.add(item)

    def add(self, request: Tokens) -> None:
        """Add a finished request, and keep it."""
        self._add(request)
        self._writer.keep()
        self.request_count += 1

    @contextmanager
    def noted(self, prompt_count: int) -> Iterator[None]:
        """Note on an exception how many prompts are kept."""
        try:
            yield
        except BaseException as error:
            if self.request_count:
                kept = f"{self.request_count} of {prompt_count} prompts are kept"
                note = f"{kept} in {self._writer.path}; `resume=True` records the others"
                error.add_note(note)
            raise

    def summary(self) -> TraceSummary:
        """Return the summary of the file, once it is closed."""
        left_out = [CUT] * (self._writer.was_cut and not self._resumes)
        return self._whole.summary(self._writer.path, self._added.totals, Counter(left_out))


def _record(
    recorder: Recorder | PagedRecorder,
    texts: Sequence[str],
    first: int,
    token_count: int,
    progress: Callable[[int, int], None] | None,
    sampling: dict[str, Any],
) -> Iterator[Tokens]:
    """Yield the requests from number `first` on, and report progress."""
    prompts = _tokenize(recorder, texts)[first:]
    most = [min(len(prompt) + token_count, recorder.context_length) for prompt in prompts]
    total = sum(most)
    report = progress or (lambda count, total: None)
    for number, prompt in enumerate(prompts):
        pieces = []
        for piece in recorder.generate(prompt, token_count, request=first + number, **sampling):
            pieces.append(piece)
            report(len(piece.request), total)
        request = join(pieces)
        total -= most[number] - len(request.request)
        yield request
        report(0, total)


def _check_target(path: str, append: bool, resume: bool, force: bool) -> None:
    if append and resume:
        problem = "to append and to resume at once"
        hint = (
            "`resume=True` goes on with a recording, `append=True` begins another in the same file"
        )
        raise RequestError(problem, path=path, hint=hint)
    try:
        check_target(path, append=append or resume, force=force)
    except RequestError as error:
        if error.hint is not None:
            error.hint += ", `resume=True` records the prompts that are missing"
        raise


def _tokenize(recorder: Recorder | PagedRecorder, texts: Sequence[str]) -> list[list[int]]:
    prompts = [recorder.tokenize(text) for text in texts]
    for number, tokens in enumerate(prompts, start=1):
        if not 0 < len(tokens) <= recorder.context_length:
            raise RequestError(
                f"prompt {number} does not fit into the context",
                expected=f"1 to {recorder.context_length} tokens",
                found=len(tokens),
                hint="a larger `context` has room for it",
            )
    return prompts
