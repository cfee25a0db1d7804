"""Hotness: how often each expert was chosen, and over how many tokens.

A hotness file is CSV, `layer,expert,count` a line, with or without that heading. Lines that start
with `#` are comments; `# tokens=N` says over how many tokens was counted, since the same skew means
less the smaller the sample.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moepack import digest
from moepack.errors import TraceError
from moepack.experts import Experts

MAX_FILE_LENGTH = 64 << 20
MAX_LINES = 1 << 20
MAX_COUNT = (1 << 53) - 1
"""Counts stay exact in every reader's numbers, JavaScript's too."""

_LINE = re.compile(r"(\d{1,5}),(\d{1,5}),(\d{1,16})\Z", re.ASCII)
_TOKENS = re.compile(r"#\s*tokens\s*=\s*(\d{1,15})\s*\Z", re.ASCII)
_HEADING = "layer,expert,count"


@dataclass(frozen=True, slots=True)
class Hotness:
    """Counts by (layer, expert), and where they came from.

    `token_count` is None where the file does not say. `digest` is the file's.
    """

    path: str
    counts: Mapping[tuple[int, int], int]
    token_count: int | None
    digest: int

    def to_json(self) -> dict[str, Any]:
        """Give the provenance as the manifest holds it."""
        return {
            "digest": digest.to_text(self.digest),
            "token_count": self.token_count,
            "selection_count": sum(self.counts.values()),
        }

    def check_fits(self, experts: Experts) -> None:
        """Raise TraceError where the counts name a layer or an expert that the model has not."""
        model = {f.layer: f.expert_count for f in experts.families if f.name == "ffn_exps"}
        for layer, expert in sorted(self.counts):
            if layer not in model:
                self._refuse(f"layer {layer}", "the model has no experts there", model)
            if expert >= model[layer]:
                self._refuse(
                    f"layer {layer}, expert {expert}", "the model has no such expert", model
                )

    def _refuse(self, place: str, problem: str, model: dict[int, int]) -> NoReturn:
        layers = sorted(model)
        shape = f"layers {layers[0]} to {layers[-1]}, up to {max(model.values())} experts"
        raise TraceError(
            problem,
            path=self.path,
            place=place,
            expected=shape if layers else "no such experts",
            hint="was it counted on another model?",
        )


def load(path: str) -> Hotness:
    """Read a hotness file; raise TraceError for what is wrong in it."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_LENGTH + 1)
    except OSError as error:
        raise TraceError(f"cannot read: {error.strerror}", path=path) from None
    return decode(data, path)


def decode(data: bytes, path: str) -> Hotness:
    """Read the bytes of a hotness file; `path` is for messages."""
    if len(data) > MAX_FILE_LENGTH:
        raise TraceError("too long", path=path, expected=f"<= {MAX_FILE_LENGTH} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError("not UTF-8 text", path=path, place=f"byte {error.start}") from None
    counts: dict[tuple[int, int], int] = {}
    token_count = None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip().replace(" ", "")
        if number > MAX_LINES:
            raise TraceError("too many lines", path=path, expected=f"<= {MAX_LINES}")
        if match := _TOKENS.match(line):
            token_count = int(match[1])
        elif line and not line.startswith("#") and line != _HEADING:
            key, count = _entry(line, number, path)
            if key in counts:
                place = f"line {number}"
                problem = f"layer {key[0]} expert {key[1]} stands twice"
                raise TraceError(problem, path=path, place=place)
            counts[key] = count
    if not counts:
        raise TraceError("no counts in it", path=path, expected=f"lines of {_HEADING}")
    return Hotness(path, counts, token_count, digest.of(data))


def _entry(line: str, number: int, path: str) -> tuple[tuple[int, int], int]:
    match = _LINE.match(line)
    if not match:
        raise TraceError(
            "not a count",
            path=path,
            place=f"line {number}",
            expected=_HEADING,
            found=repr(line[:60]),
        )
    count = int(match[3])
    if count > MAX_COUNT:
        raise TraceError(
            "count out of bounds", path=path, place=f"line {number}", expected=f"<= {MAX_COUNT}",
            found=count,
        )  # fmt: skip
    return (int(match[1]), int(match[2])), count
