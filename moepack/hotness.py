"""Hotness: how often each expert was chosen, and over how many tokens.

A hotness file is CSV, `layer,expert,count` a line, with or without that heading. Lines that start
with `#` are comments; `# tokens=N` says over how many tokens was counted, since the same skew means
less the smaller the sample.
"""

import codecs
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moepack import digest
from moepack.errors import TraceError
from moepack.experts import Experts

MAX_FILE_LENGTH = 8 << 20
MAX_LINES = 1 << 18
MAX_LINE_LENGTH = 1 << 10
MAX_COUNT = (1 << 53) - 1
"""Counts stay exact in every reader's numbers, JavaScript's too."""

_LINE = re.compile(r"(\d{1,5}) *, *(\d{1,5}) *, *(\d{1,16})\Z", re.ASCII)
_TOKENS = re.compile(r"#\s*tokens\s*=\s*(\d{1,15})\s*\Z", re.ASCII)
_STATES_TOKENS = re.compile(r"#\s*tokens\s*=", re.ASCII)
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
        layers, most = sorted(model) or [0], max(model.values(), default=0)
        shape = f"layers {layers[0]} to {layers[-1]}, up to {most} experts"
        raise TraceError(
            problem,
            path=self.path,
            place=place,
            expected=shape,
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
    counts: dict[tuple[int, int], int] = {}
    token_count = None
    lines = io.BytesIO(data.removeprefix(codecs.BOM_UTF8))
    for number, raw in enumerate(lines, 1):
        place = f"line {number}"
        line = _text(raw, place, path)
        if number > MAX_LINES:
            raise TraceError("too many lines", path=path, expected=f"<= {MAX_LINES}")
        if not line or line == _HEADING:
            continue
        if line.startswith("#"):
            token_count = _tokens(line, token_count, place, path)
            continue
        key, count = _entry(line, place, path)
        if key in counts:
            problem = f"layer {key[0]} expert {key[1]} stands twice"
            raise TraceError(problem, path=path, place=place)
        counts[key] = count
    if not counts:
        raise TraceError("no counts in it", path=path, expected=f"lines of {_HEADING}")
    return Hotness(path, counts, token_count, digest.of(data))


def _text(raw: bytes, place: str, path: str) -> str:
    if len(raw) > MAX_LINE_LENGTH:
        expected = f"<= {MAX_LINE_LENGTH} bytes"
        raise TraceError("line too long", path=path, place=place, expected=expected, found=len(raw))
    try:
        return raw.decode().strip()
    except UnicodeDecodeError:
        raise TraceError("not UTF-8 text", path=path, place=place) from None


def _tokens(comment: str, before: int | None, place: str, path: str) -> int | None:
    """Take the token count from a comment that states one."""
    if not _STATES_TOKENS.match(comment):
        return before
    match = _TOKENS.match(comment)
    if match is None or before is not None:
        problem = "not a token count" if match is None else "a second token count"
        expected = "# tokens=N, once"
        raise TraceError(problem, path=path, place=place, expected=expected, found=comment)
    return int(match[1])


def _entry(line: str, place: str, path: str) -> tuple[tuple[int, int], int]:
    match = _LINE.match(line)
    if not match:
        raise TraceError("not a count", path=path, place=place, expected=_HEADING, found=repr(line))
    count = int(match[3])
    if count > MAX_COUNT:
        expected = f"<= {MAX_COUNT}"
        raise TraceError(
            "count out of bounds", path=path, place=place, expected=expected, found=count
        )
    return (int(match[1]), int(match[2])), count
