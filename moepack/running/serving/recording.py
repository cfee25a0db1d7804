"""Record a trace: llama.cpp's server runs a model on prompts, and its routers are watched."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from moepack.common import digest
from moepack.common.errors import MachineError, RequestError, TraceError
from moepack.common.extras import require
from moepack.common.sizes import Size
from moepack.host.memory_limits import memory_length
from moepack.host.processors import cpu_count
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.pack import Pack
from moepack.running.programs.trace_writer import lost_text, origin_of
from moepack.running.serving.client import AnswerFacts
from moepack.running.serving.model_server import ModelServer
from moepack.running.serving.sampling import MAX_CONTEXT, MAX_THREADS, Sampling, check_bounds
from moepack.running.serving.server_memory import MemoryLimits
from moepack.running.serving.server_options import single_text_server
from moepack.running.streaming.supervisor import StreamingOptions
from moepack.traces.compressed import TraceStream
from moepack.traces.file import CUT
from moepack.traces.file_records import encode_origin
from moepack.traces.file_writer import Writer, check_target
from moepack.traces.model import Item, Origin, Phase, Tokens, join, tokens_of
from moepack.traces.steps import TraceCounter, TraceSummary

_BATCH_COUNT = 256
"""Tokens computed at once, whatever memory there is: other batches round otherwise."""
_LOST = "selection of a layer, which moepack was too busy to read in time"
MAX_PROMPTS_LENGTH = 1 << 28
"""Most bytes of a file of prompts."""
_PROMPTS_HINT = 'give one prompt a line, or JSON lines: a string or {"prompt": string}'


def record_trace(
    model: str | os.PathLike[str],
    prompts: str | os.PathLike[str] | Sequence[str],
    target: str | os.PathLike[str],
    *,
    resume: bool = False,
    force: bool = False,
    tokens: int = 128,
    context: int = 4096,
    threads: int | None = None,
    temperature: float = 0.8,
    seed: int = 0,
    memory: Size | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TraceSummary:
    """Run `model` on each prompt, and on up to `tokens` tokens after it; write the trace.

    `model` is any shard of a GGUF, or a pack: llama.cpp's server runs it as by `serve`, with up to
    `memory` for experts, a length or a text such as `8GiB` or `floor`. Of the last layer it
    computes only tokens that have an output, so of that layer the trace has a prompt's last token
    alone.

    `prompts` are texts, or the path of a file of them (`read_prompts`). Each is one request, and is
    kept when it is finished: a process that is killed, interrupted, or out of space only loses the
    current request; the exception has a note with the number of kept ones. With `resume`, the same
    call records the missing prompts, or all if there is no file. `progress` is called with the
    number of tokens since the last call, and with their maximum.

    Raises what `ModelServer` and `Writer` raise, and RequestError, before anything is run, for a
    prompt that is longer than the context, if `target` exists and neither `resume` nor `force` is
    given, and for a file to resume that is another recording's.
    """
    path = os.fspath(target)
    _check_target(path, resume, force)
    texts = read_prompts(os.fspath(prompts)) if isinstance(prompts, str | os.PathLike) else prompts
    sampling = Sampling(temperature=temperature, min_p=0, seed=seed)
    sampling.check()
    check_bounds("context length", context, 1, MAX_CONTEXT)
    if threads is not None:
        check_bounds("threads", threads, 1, MAX_THREADS)
    memory = memory_length(memory)
    advance = progress or (lambda count, total: None)
    with open_model(model) as pack, Writer(path, resume=resume) as writer:
        pack.require_files()
        name = digest.xxh3(json.dumps([texts, tokens, context, temperature, seed]).encode())
        origin = replace(origin_of(pack), recording=digest.to_text(name))
        recording = _Recording(writer, origin, resume)
        with recording.noted(len(texts)):
            if recording.request_count < len(texts):
                with _open_server(pack, memory, context, threads) as server:
                    tokenized = _tokenize(server, texts, context)
                    counts = [min(tokens, context - len(prompt)) for prompt in tokenized]
                    requests = list(enumerate(zip(tokenized, counts, strict=True)))
                    missing = requests[recording.request_count :]
                    for request in _record(server, missing, sampling, advance):
                        recording.add(request)
                    recording.lost_count = server.supervisor.lost_count
    return recording.summary()


def read_prompts(path: str) -> list[str]:
    """Read prompts: one text a line, or JSON lines, each a string or {"prompt": string}.

    Blank lines are skipped. If the first other line begins with `{` or is a JSON string, all are
    JSON. The file may be compressed. Raises TraceError for a file without prompts, a wrong line,
    with its number, and another encoding than UTF-8; MachineError for a file that cannot be read.
    """
    with TraceStream(path) as stream:
        data = stream.read_whole(MAX_PROMPTS_LENGTH + 1)
    if len(data) > MAX_PROMPTS_LENGTH:
        raise TraceError("too long", path=path, expected=f"up to {MAX_PROMPTS_LENGTH} bytes")
    try:
        # Not splitlines: the line ends that only Unicode knows are part of a prompt.
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise TraceError("not UTF-8 text", path=path, place=f"byte {error.start}") from None
    numbered = [
        (number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not numbered:
        raise TraceError("no prompts", path=path, hint=_PROMPTS_HINT)
    first = numbered[0][1].lstrip()
    is_json = first.startswith("{")
    with suppress(ValueError, RecursionError):
        is_json = is_json or isinstance(json.loads(first), str)
    if is_json:
        return [_json_prompt(line, path, f"line {number}") for number, line in numbered]
    return [line for _, line in numbered]


def _json_prompt(line: str, path: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}", path=path, place=place) from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt.strip():
        problem = "an empty prompt" if isinstance(prompt, str) else "not a prompt"
        raise TraceError(problem, path=path, place=place, hint=_PROMPTS_HINT)
    return prompt


def _open_server(pack: Pack, memory: Size | None, context: int, threads: int | None) -> ModelServer:
    require("run")
    count = min(cpu_count(), MAX_THREADS) if threads is None else threads
    sizes: Any = {"context": context, "threads": count, "micro_batch": _BATCH_COUNT}
    words, memory, beside = single_text_server(pack, (), MemoryLimits(memory), **sizes)
    return ModelServer(pack, StreamingOptions(memory, beside=beside), options=words, records=True)


class _Recording:
    """The requests of one recording in a trace, with the file's earlier ones.

    With `resume` the file's last recording is continued. Raises RequestError if that has another
    origin.
    """

    def __init__(self, writer: Writer, origin: Origin, resume: bool) -> None:
        self._writer, self._resumes = writer, resume
        self._whole, self._added = TraceCounter(), TraceCounter()
        self.lost_count = 0
        """Selections that nobody read in time, so that the recording lacks them."""
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
            hint = "record into another file: commands that read traces take several"
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
        left_out = Counter([CUT] * (self._writer.was_cut and not self._resumes))
        if self.lost_count:
            left_out[_LOST] = self.lost_count
        return self._whole.summary(self._writer.path, self._added.totals, left_out)


def _record(
    server: ModelServer,
    requests: Sequence[tuple[int, tuple[list[int], int]]],
    sampling: Sampling,
    progress: Callable[[int, int], None],
) -> Iterator[Tokens]:
    """Yield computed requests: each has a number, a prompt, and the number of tokens after it."""
    total = sum(len(prompt) + count for _, (prompt, count) in requests)
    server.supervisor.pop_calls(with_open=True)  # with which the server tried its context
    for number, (prompt, token_count) in requests:
        done = 0
        for count in _compute(server, prompt, token_count, sampling):
            progress(count - done, total)
            done = count
        yield _pop_request(server, number, len(prompt), done)
        total -= len(prompt) + token_count - done
        progress(0, total)


def _compute(
    server: ModelServer, prompt: Sequence[int], token_count: int, sampling: Sampling
) -> Iterator[int]:
    """Compute a prompt and the tokens after it; yield the number of computed tokens."""
    # The last token of a text is not computed.
    options: Any = {"count": token_count + 1, "sampling": sampling, "more": {"cache_prompt": False}}
    with server.expert_failures(), server.client.complete(prompt, **options) as answer:
        for _ in answer:
            yield _computed_count(answer.facts)
        yield _computed_count(answer.facts)


def _computed_count(facts: AnswerFacts) -> int:
    return max(facts.processed_count, facts.prompt.step_count) + facts.step_count


def _pop_request(server: ModelServer, request: int, prompt_count: int, count: int) -> Tokens:
    """Return the experts of a computed request; raise MachineError unless they are `count`."""
    pieces: list[Tokens] = []
    done = 0
    for call in server.supervisor.pop_calls(with_open=True):
        phase = Phase.PREFILL if done < prompt_count else Phase.DECODE
        pieces += tokens_of(call.layers, request, phase)
        done += max(map(len, call.layers.values()))
    if done != count:
        lost = server.supervisor.lost_count
        raise MachineError(
            lost_text(lost) if lost else "llama.cpp computed other tokens than it says",
            path=server.pack.path,
            expected=f"experts of {count:,} tokens",
            found=f"{done:,}",
        )
    return join(pieces)


def _check_target(path: str, resume: bool, force: bool) -> None:
    if resume and force:
        raise RequestError("`force` and `resume` at once", path=path)
    try:
        check_target(path, force=force or resume)
    except RequestError as error:
        if error.hint is not None:
            error.hint += ", `resume=True` records the prompts that are missing"
        raise


def _tokenize(server: ModelServer, texts: Sequence[str], context: int) -> list[list[int]]:
    prompts = [server.client.tokenize(text, special=True) for text in texts]
    for number, tokens in enumerate(prompts, start=1):
        if not 0 < len(tokens) <= context:
            raise RequestError(
                f"prompt {number} does not fit into the context",
                expected=f"1 to {context} tokens",
                found=len(tokens),
                hint="a larger `context` has room for it",
            )
    return prompts
