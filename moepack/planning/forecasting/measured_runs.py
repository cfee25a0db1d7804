"""Measured runs of an engine (receipts), from the JSON that it wrote itself.

Of llama.cpp's llama-bench (`-o json` or `-o jsonl`) the tests that generate tokens and compute no
prompt; and the output of `moepack run --json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from moepack.common.errors import RequestError, read_failure
from moepack.common.fields import Fields
from moepack.common.paths import PathOrPaths, path_texts
from moepack.planning.forecasting.rates import Kind

_MAX_LENGTH = 64 << 20
_SPEEDS = (1e-4, 1e6)
"""The range of tokens a second of a run."""
_MOST = 1e18
_NO_GPU = frozenset({"CPU", "BLAS", "RPC", ""})
_EXPECTED = "the output of `llama-bench -o json` or `moepack run --json`"


class MeasuredRun(NamedTuple):
    """A measured run, at a `place` in the file at `path`.

    `model_length` is the bytes of all tensors. `cpu_layer_count` is N of `--n-cpu-moe N`,
    `overrides` are patterns of tensors that are kept in memory. There were `depth` tokens before
    the measured ones. `budget` is the bytes of a cache of experts. A token read `read_length` bytes
    of the drive, and waited `read_seconds` for them. `fields` of the file were used. `exclusion`
    says why the run can calibrate nothing. A token of the prompt took `prompt_seconds` to compute,
    without waiting for the drive: None is unknown.
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
    read_length: float = 0.0
    read_seconds: float = 0.0
    fields: tuple[str, ...] = ()
    exclusion: str | None = None
    prompt_seconds: float | None = None

    @property
    def setting(self) -> tuple[Kind, int, tuple[str, ...]]:
        """The settings that a test of a prompt and one of tokens share if they ran alike."""
        return self.kind, self.cpu_layer_count, self.overrides

    def keeps_in_memory(self, layer: int) -> bool:
        """Return whether the experts of a layer are in memory, while the rest is in VRAM.

        llama.cpp's patterns of `--n-cpu-moe` name the first blocks, dense ones too (common/arg.cpp,
        b11549).
        """
        name = f"blk.{layer}.ffn_up_exps.weight"
        return layer < self.cpu_layer_count or any(
            re.search(pattern, name) for pattern in self.overrides
        )


class ReceiptFile(NamedTuple):
    """The bytes of a file of measured runs, and its path, for messages."""

    path: str
    data: bytes


AnyReceipts = PathOrPaths | Sequence[ReceiptFile]
"""Files of measured runs, by their paths, or read already."""


def read_receipt(path: str) -> ReceiptFile:
    """Read a file. Raises RequestError for one that cannot be read, or is too long."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_LENGTH + 1)
    except OSError as error:
        raise read_failure(error, path, RequestError) from None
    if len(data) > _MAX_LENGTH:
        raise RequestError("too long for a file of measurements", path=path)
    return ReceiptFile(path, data)


def read_runs(receipts: AnyReceipts) -> list[MeasuredRun]:
    """Return the measured runs in files, each with one or more.

    Raises RequestError for files without runs, without their model, and without a test of
    generating tokens.
    """
    several = receipts if isinstance(receipts, Sequence) else ()
    files = [one for one in several if isinstance(one, ReceiptFile)]
    if not files:
        files = list(map(read_receipt, path_texts(cast(PathOrPaths, receipts))))
    return [run for file in files for run in _runs_in(file)]


def _runs_in(file: ReceiptFile) -> list[MeasuredRun]:
    path, runs = file.path, []
    prompts: dict[tuple[Kind, int, tuple[str, ...]], float] = {}
    for place, body in _entries(file):
        entry = _Entry(path, place, body)
        if "read_length" in body and "memory" in body:
            runs.append(_from_run(entry))
        elif "n_gen" in body:
            if entry.count("n_gen") and not entry.count("n_prompt"):
                runs.append(_from_bench(entry))
            elif entry.count("n_prompt") and not entry.count("n_gen"):
                test = _from_bench(entry)
                prompts[test.setting] = 1 / test.tokens_per_second
        else:
            raise RequestError("not a receipt", path=path, place=place, expected=_EXPECTED)
    if not runs:
        raise RequestError(
            "no test that generates tokens and computes no prompt",
            path=path,
            expected="n_gen of 1 or more, and n_prompt 0",
            hint="llama-bench -p 512 -n 128 -o json",
        )
    return [
        run._replace(prompt_seconds=prompts.get(run.setting, run.prompt_seconds)) for run in runs
    ]


def _entries(file: ReceiptFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a file, with their places: one, an array, or one a line."""
    path, data = file
    entries: list[tuple[str, Any]] = []
    try:
        body = json.loads(data)
        bodies = body if isinstance(body, list) else [body]
        entries += ((f"entry {number}", one) for number, one in enumerate(bodies, 1))
    except (ValueError, RecursionError):
        for number, line in enumerate(data.splitlines(), 1):
            place = f"line {number}"
            try:
                if line.strip():
                    entries.append((place, json.loads(line)))
            except (ValueError, RecursionError):
                hint = "llama-bench writes Markdown without -o json"
                raise RequestError(
                    "not JSON", path=path, place=place, expected=_EXPECTED, hint=hint
                ) from None
    if not entries:
        raise RequestError("empty", path=path, expected=_EXPECTED)
    for place, one in entries:
        if not isinstance(one, dict):
            raise RequestError("not a receipt", path=path, place=place, expected=_EXPECTED)
        yield place, one


class _Entry(Fields):
    """One object of a file, which notes the fields that were used."""

    def __init__(self, path: str, place: str, body: Mapping[str, Any]) -> None:
        super().__init__(body, place, path, RequestError)
        self.used: dict[str, None] = {}

    def at(self, key: str) -> str:
        return f"{self.place}: {key}"

    def get(self, key: str) -> Any:
        value = self.body.get(key)
        if value is not None:
            self.used[key] = None
        return value

    def figure(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not -1 <= number <= _MOST:
            self.fail(key, "not a possible number", actual=value)
        return number

    def count(self, key: str) -> int:
        """Return a count; 0 if it is absent, as older versions wrote none."""
        return max(0, int(self.figure(key) or 0))

    def amount(self, key: str) -> float:
        """Return a number that is no less than 0; 0 if it is absent."""
        number = self.figure(key) or 0.0
        if number < 0:
            self.fail(key, "less than 0", actual=number)
        return number

    def speed(self, key: str, speed: float) -> float:
        """Return the tokens a second that follow from a field, if they are possible."""
        least, most = _SPEEDS
        if not least <= speed <= most:
            self.fail(key, "not a possible speed", actual=f"{speed:g} tok/s")
        return speed

    def model_length(self, key: str) -> int:
        length = self.amount(key)
        if length < 1:
            self.fail(key, "the receipt does not name its model")
        return int(length)

    def part(self, key: str) -> _Entry:
        body = self.get(key)
        if not isinstance(body, dict):
            self.fail(key, "missing")
        return _Entry(self.path, self.at(key), body)


def _from_run(entry: _Entry) -> MeasuredRun:
    """Read the output of `moepack run --json`."""
    length = entry.model_length("model_length")
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
        problem = "it waited longer for the drive than it ran"
        expected = f"up to {seconds:g} s, as `seconds` says"
        entry.fail("read_seconds", problem, expected, f"{read_seconds:g} s")
    depth = entry.count("prompt_count") + steps / 2
    prompt_seconds = None
    if isinstance(entry.get("prompt"), dict):
        prompt = entry.part("prompt")
        if count := prompt.count("step_count"):
            waited = prompt.amount("read_seconds")
            prompt_seconds = max(0.0, prompt.amount("seconds") - waited) / count or None
    return MeasuredRun(
        entry.path,
        entry.place,
        "stream",
        length,
        entry.speed("seconds", steps / seconds),
        depth,
        budget=entry.part("memory").count("experts") or None,
        read_length=entry.amount("read_length") / steps,
        read_seconds=read_seconds / steps,
        fields=tuple(entry.used),
        prompt_seconds=prompt_seconds,
    )


def _from_bench(entry: _Entry) -> MeasuredRun:
    """Read one test of llama-bench, of generating tokens or of computing a prompt."""
    length = entry.model_length("model_size")
    cpu_layers, overrides = entry.count("n_cpu_moe"), tuple(_overrides(entry))
    gpu_layers = entry.figure("n_gpu_layers")
    kind: Kind = "offload" if cpu_layers or overrides else "gpu"
    if gpu_layers == 0 or not _has_gpu(entry):
        kind = "cpu"
    exclusion = None
    if entry.count("moe_cache"):
        exclusion = "experts went through a cache, and its misses are not stated"
    return MeasuredRun(
        entry.path,
        entry.place,
        kind,
        length,
        entry.speed("avg_ts", entry.amount("avg_ts")),
        entry.count("n_depth") + entry.count("n_gen") / 2,
        cpu_layers,
        None if gpu_layers is None or gpu_layers < 0 else int(gpu_layers),
        overrides,
        fields=tuple(entry.used),
        exclusion=exclusion,
    )


def _has_gpu(entry: _Entry) -> bool:
    """Return whether a build used a GPU."""
    backends = entry.get("backends")
    names = re.split(r"[,+ ]+", backends.upper()) if isinstance(backends, str) else ["GPU"]
    return not _NO_GPU.issuperset(names)


def _overrides(entry: _Entry) -> Iterator[str]:
    """Yield the patterns of tensors that were kept in memory: `PATTERN=CPU;…`, or `none`."""
    overrides = entry.get("tensor_buft_overrides")
    for item in overrides.split(";") if isinstance(overrides, str) else ():
        pattern, _, device = item.rpartition("=")
        if pattern and device.upper().startswith("CPU"):
            try:
                re.compile(pattern)
            except re.error:
                entry.fail("tensor_buft_overrides", "not a pattern", actual=pattern)
            yield pattern
