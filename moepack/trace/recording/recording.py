"""Record a trace: run a model on prompts, and keep what its routers chose."""

import os
from collections import Counter
from collections.abc import Callable, Sequence

from moepack.errors import RequestError
from moepack.trace.file import Writer, check_target, held_items
from moepack.trace.file_records import join
from moepack.trace.recording.prompts import read_prompts
from moepack.trace.recording.recorder import Recorder
from moepack.trace.summary import TraceCounter, TraceSummary


def record_trace(
    model: str | os.PathLike[str],
    prompts: str | os.PathLike[str] | Sequence[str],
    target: str | os.PathLike[str],
    *,
    append: bool = False,
    force: bool = False,
    tokens: int = 128,
    context: int = 4096,
    threads: int | None = None,
    temperature: float = 0.8,
    seed: int = 0,
    repack: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> TraceSummary:
    """Run `model` on each prompt, and on up to `tokens` tokens after it; write what was chosen.

    `prompts` are texts, or the path of a file of them (`prompts.read_prompts`). Each is a request
    of its own, and is kept when it is through: a process that is killed, interrupted, or out of
    space loses the request that it is at, no more; the exception has a note of how many are kept.
    `progress` is called with 1 after each, and with how many there are. For `temperature` and
    `seed` see `Recorder.generate`, for `repack` see `Recorder`. Raises what `Recorder` and `Writer`
    raise, and RequestError, before anything is run, for a prompt that is longer than the context,
    or where `target` exists and neither `append` nor `force` is given.
    """
    path = os.fspath(target)
    check_target(path, append=append, force=force)
    texts = _texts(prompts)
    whole, added = TraceCounter(), TraceCounter()
    with (
        Writer(path, append=append) as writer,
        Recorder(
            os.fspath(model), context_length=context, threads=threads, repack=repack
        ) as recorder,
    ):
        for item in held_items(path, append):
            whole.add(item)
        requests = _tokenize(recorder, texts)
        for taker in (writer, whole, added):
            taker.add(recorder.origin)
        try:
            for number, prompt in enumerate(requests):
                pieces = recorder.generate(
                    prompt, tokens, request=number, temperature=temperature, seed=seed
                )
                piece = join(list(pieces))
                for taker in (writer, whole, added):
                    taker.add(piece)
                writer.keep()
                if progress is not None:
                    progress(1, len(requests))
        except BaseException as error:
            if added.totals.request_count:
                kept = f"{added.totals.request_count} of {len(requests)} prompts are kept"
                error.add_note(f"{kept} in {writer.path}")
            raise
    return whole.summary(path, added.totals, Counter())


def _texts(prompts: str | os.PathLike[str] | Sequence[str]) -> Sequence[str]:
    if isinstance(prompts, str | os.PathLike):
        return read_prompts(os.fspath(prompts))
    return prompts


def _tokenize(recorder: Recorder, prompts: Sequence[str]) -> list[list[int]]:
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
