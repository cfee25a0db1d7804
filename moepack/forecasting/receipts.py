"""Receipts: measured runs of an engine, from the JSON that it wrote itself.

Of llama.cpp's llama-bench (`-o json` or `-o jsonl`, of any age: fields came and went) those tests
that generate tokens and compute no prompt; and what `moepack run --json` prints.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from moepack.errors import RequestError
from moepack.forecasting.reads import Kind

_MAX_LENGTH = 64 << 20
_SPEEDS = (1e-4, 1e6)
"""Tokens a second that a receipt may have."""
_MOST = 1e18
_FEW = 0.05
"""Of all misses: so many may have been read ahead that it makes no difference."""
_NO_GPU = frozenset({"CPU", "BLAS", "RPC", ""})
_WHO = "what `llama-bench -o json` or `moepack run --json` wrote"


class Receipt(NamedTuple):
    """A measured run.

    `place` is where it stands in the file at `path`. `model_length` is the bytes of all tensors.
    `cpu_layer_count` is N of `--n-cpu-moe N`, `overrides` are patterns of tensors that are kept in
    memory. `depth` is how many tokens were there before those that were measured. `budget` is the
    bytes of a cache of experts, `floor` what one step needs of them, `read_length` what a token
    read of the drive, `read_seconds` how long it waited for it. `fields` are those of the file that
    say so. `flaw` says why it can calibrate nothing. `prompt_seconds` are those that a token of the
    prompt took to compute, without waiting for the drive: None where that is not said.
    """

    path: str
    place: str
    kind: Kind
    model_length: int
    tokens_per_second: float
    depth: float
    cpu_layer_count: int = 0
    gpu_layer_count: int | None = None
    overrides: tuple[str, ...] = ()
    budget: int | None = None
    floor: int | None = None
    read_length: float = 0.0
    read_seconds: float = 0.0
    fields: tuple[str, ...] = ()
    flaw: str | None = None
    prompt_seconds: float | None = None

    @property
    def is_near_floor(self) -> bool:
        """Whether it had little more memory for experts than one step needs."""
        return bool(self.budget and self.floor and self.budget <= 2 * self.floor)

    def keeps_in_memory(self, layer: int) -> bool:
        """Say whether the experts of a layer are in memory, while the rest is in VRAM.

        llama.cpp's patterns of `--n-cpu-moe` name the first blocks, dense ones too (common/arg.cpp,
        b11549).
        """
        name = f"blk.{layer}.ffn_up_exps.weight"
        return layer < self.cpu_layer_count or any(
            re.search(pattern, name) for pattern in self.overrides
        )


def read_receipts(paths: Sequence[str]) -> list[Receipt]:
    """Read receipts from files, each with one or more.

    Raises RequestError for files that are none, that do not say which model was run, and that have
    no test of generating tokens.
    """
    return [receipt for path in paths for receipt in _read(path)]


def _read(path: str) -> list[Receipt]:
    found = []
    prompts: dict[_Setting, float] = {}
    entries = _entries(path)
    for place, body in entries:
        entry = _Entry(path, place, body)
        if "read_length" in body and "memory" in body:
            found.append(_of_run(entry))
        elif "n_gen" in body:
            if entry.count("n_gen") and not entry.count("n_prompt"):
                found.append(_of_bench(entry))
            elif entry.count("n_prompt") and not entry.count("n_gen"):
                test = _of_bench(entry)
                prompts[_setting(test)] = 1 / test.tokens_per_second
        else:
            raise RequestError("not a receipt", path=path, place=place, expected=_WHO)
    if not found:
        raise RequestError(
            "no test that generates tokens and computes no prompt",
            path=path,
            expected="n_gen of 1 or more, and n_prompt 0",
            hint="llama-bench -p 512 -n 128 -o json",
        )
    return [
        receipt._replace(prompt_seconds=prompts.get(_setting(receipt), receipt.prompt_seconds))
        for receipt in found
    ]


_Setting = tuple[Kind, int, tuple[str, ...]]
"""What tests of llama-bench have in common that were done in the same way: a prompt, and tokens."""


def _setting(receipt: Receipt) -> _Setting:
    return receipt.kind, receipt.cpu_layer_count, receipt.overrides


def _entries(path: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the objects in a file: one, an array of them, or one in each line."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_LENGTH + 1)
    except OSError as error:
        raise RequestError(f"cannot read: {error.strerror}", path=path) from None
    if len(data) > _MAX_LENGTH:
        raise RequestError("too long for a receipt", path=path, expected=_WHO)
    body: Any
    try:
        body = json.loads(data)
        bodies = list(body) if isinstance(body, list) else [body]
        places = [f"entry {number}" for number in range(1, len(bodies) + 1)]
    except (ValueError, RecursionError):
        bodies, places = [], []
        for number, line in enumerate(data.splitlines(), 1):
            if line.strip():
                bodies.append(_line(path, number, line))
                places.append(f"line {number}")
    if not bodies:
        raise RequestError("empty", path=path, expected=_WHO)
    for place, one in zip(places, bodies, strict=True):
        if not isinstance(one, dict):
            raise RequestError("not a receipt", path=path, place=place, expected=_WHO)
    return list(zip(places, bodies, strict=True))


def _line(path: str, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        place = f"line {number}"
        hint = "llama-bench writes Markdown unless it is told: -o json"
        raise RequestError("not JSON", path=path, place=place, expected=_WHO, hint=hint) from None


class _Entry:
    """One object of a file, which notes the fields that were used."""

    def __init__(self, path: str, place: str, body: Mapping[str, Any]) -> None:
        self.path = path
        self.place = place
        self._body = body
        self.used: dict[str, None] = {}

    def get(self, key: str) -> Any:
        """Return a field, None where it is absent."""
        value = self._body.get(key)
        if value is not None:
            self.used[key] = None
        return value

    def number(self, key: str) -> float | None:
        """Return a field that is a number, if it is there. Raises RequestError for others."""
        value = self.get(key)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not -1 <= number <= _MOST:
            self.fail(key, "not a number that this can be", value)
        return number

    def count(self, key: str) -> int:
        """Return a field that is a count; 0 where it is absent, as older versions wrote none."""
        return max(0, int(self.number(key) or 0))

    def positive(self, key: str) -> float:
        """Return a field that has to be there and more than 0."""
        number = self.number(key)
        if number is None:
            self.fail(key, "missing", None)
        if number <= 0:
            self.fail(key, "not more than 0", number)
        return number

    def amount(self, key: str) -> float:
        """Return a field that is no less than 0; 0 where it is absent."""
        number = self.number(key) or 0.0
        if number < 0:
            self.fail(key, "less than 0", number)
        return number

    def speed(self, key: str, speed: float) -> float:
        """Return the tokens a second that follow from a field, if they are possible."""
        least, most = _SPEEDS
        if not least <= speed <= most:
            self.fail(key, "not a speed that this can be", f"{speed:g} tok/s")
        return speed

    def part(self, key: str) -> _Entry:
        """Return a field that is an object itself."""
        body = self.get(key)
        if not isinstance(body, dict):
            self.fail(key, "missing", None)
        return _Entry(self.path, f"{self.place}: {key}", body)

    def fail(self, key: str, problem: str, found: object) -> NoReturn:
        """Raise for a field."""
        place = f"{self.place}: {key}"
        raise RequestError(problem, path=self.path, place=place, found=found)


def _of_run(entry: _Entry) -> Receipt:
    """Take what `moepack run --json` prints."""
    length = entry.amount("model_length")
    if length < 1:
        entry.fail("model_length", "the receipt does not say which model was run", None)
    steps, seconds = entry.amount("step_count"), entry.amount("seconds")
    if not steps or not seconds:
        raise RequestError(
            "too short to be a receipt",
            path=entry.path,
            place=entry.place,
            expected="some tokens after the first",
            hint="moepack run … -n 100 --json",
        )
    read_seconds = entry.amount("read_seconds")
    if read_seconds > seconds:
        raise RequestError(
            "it waited longer for the drive than it ran",
            path=entry.path,
            place=f"{entry.place}: read_seconds",
            expected=f"up to {seconds:g} s, as `seconds` says",
            found=f"{read_seconds:g} s",
        )
    prompt = entry.count("prompt_count")
    flaw = None
    if entry.count("prefetched") > _FEW * entry.count("misses"):
        flaw = "experts were read ahead, which helps at some budgets only"
    memory = entry.part("memory")
    prompt_seconds = None
    if isinstance(entry.get("prompt"), dict):
        phase = entry.part("prompt")
        count = phase.count("step_count")
        if count:
            waited = phase.amount("read_seconds")
            prompt_seconds = max(0.0, phase.amount("seconds") - waited) / count or None
    return Receipt(
        entry.path,
        entry.place,
        "stream",
        int(length),
        entry.speed("seconds", steps / seconds),
        prompt + steps / 2,
        budget=memory.count("experts") or None,
        floor=memory.count("floor") or None,
        read_length=entry.amount("read_length") / steps,
        read_seconds=read_seconds / steps,
        fields=tuple(entry.used),
        flaw=flaw,
        prompt_seconds=prompt_seconds,
    )


def _of_bench(entry: _Entry) -> Receipt:
    """Take one test of llama-bench, of generating tokens or of computing a prompt."""
    length = entry.number("model_size")
    if not length or length < 1:
        entry.fail("model_size", "the receipt does not say which model was run", None)
    cpu_layers = entry.count("n_cpu_moe")
    overrides = tuple(_overrides(entry))
    gpu_layers = entry.number("n_gpu_layers")
    kind: Kind = "offload" if cpu_layers or overrides else "gpu"
    if gpu_layers == 0 or not _has_gpu(entry):
        kind = "cpu"
    flaw = None
    if entry.count("moe_cache"):
        flaw = "experts went through a cache, and it is not said what that missed"
    return Receipt(
        entry.path,
        entry.place,
        kind,
        int(length or 0),
        _speed(entry),
        entry.count("n_depth") + entry.count("n_gen") / 2,
        cpu_layers,
        None if gpu_layers is None or gpu_layers < 0 else int(gpu_layers),
        overrides,
        fields=tuple(entry.used),
        flaw=flaw,
    )


def _speed(entry: _Entry) -> float:
    """Return the tokens a second of a test."""
    if entry.get("avg_ts") is not None:
        return entry.speed("avg_ts", entry.positive("avg_ts"))
    count = entry.count("n_gen") or entry.count("n_prompt")
    return entry.speed("avg_ns", count / entry.positive("avg_ns") * 1e9)


def _has_gpu(entry: _Entry) -> bool:
    """Say whether a build used a GPU; older versions name each backend by a flag of its own."""
    backends = entry.get("backends")
    if isinstance(backends, str):
        return not set(re.split(r"[,+ ]+", backends.upper())) <= _NO_GPU
    flags = ("cuda", "hip", "metal", "vulkan", "sycl", "opencl", "kompute", "gpu_blas")
    stated = [flag for flag in flags if entry.get(flag) is not None]
    return any(entry.get(flag) is True for flag in stated) or not stated


def _overrides(entry: _Entry) -> Iterator[str]:
    """Yield the patterns of tensors that were kept in memory: `PATTERN=CPU;…`, or `none`."""
    stated = entry.get("tensor_buft_overrides")
    for item in stated.split(";") if isinstance(stated, str) else ():
        pattern, _, place = item.rpartition("=")
        if pattern and place.upper().startswith("CPU"):
            try:
                re.compile(pattern)
            except re.error:
                entry.fail("tensor_buft_overrides", "not a pattern", pattern)
            yield pattern
