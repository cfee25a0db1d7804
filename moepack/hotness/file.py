"""Hotness: how often each expert was chosen, and over how many tokens.

A hotness file is CSV, `layer,expert,count` a line, with or without that heading; a fourth column,
`held_out`, is the part of the count that nothing was learned from. Lines that start with `#` are
comments, of which some are facts: `# tokens=N` (over how many tokens was counted, since the same
skew means less the smaller the sample), `# requests=N`, `# held_out=requests` or `time`,
`# held_out_tokens=N`, `# origin={…}` (JSON, one a trace).
"""

import codecs
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from moepack import digest
from moepack.errors import TraceError
from moepack.shape import ModelShape

MAX_FILE_LENGTH = 8 << 20
MAX_LINES = 1 << 18
MAX_LINE_LENGTH = 1 << 10
MAX_COUNT = (1 << 53) - 1
"""Counts stay exact in every reader's numbers, JavaScript's too."""

_LINE = re.compile(r"(\d{1,5}) *, *(\d{1,5}) *, *(\d{1,16})(?: *, *(\d{1,16}))?\Z", re.ASCII)
_FACT = re.compile(r"#\s*(tokens|requests|held_out_tokens)\s*=\s*(.*?)\s*\Z", re.ASCII)
_HALVES = re.compile(r"#\s*held_out\s*=\s*(requests|time)\s*\Z", re.ASCII)
_ORIGIN = re.compile(r"#\s*origin\s*=\s*(\{.*\})\s*\Z", re.ASCII)
_HEADINGS = ("layer,expert,count", "layer,expert,count,held_out")


class HeldOut(NamedTuple):
    """The half of what was measured that nothing is to be learned from, to judge by.

    `by` says what divides the halves: `requests` or `time`.
    """

    by: str
    token_count: int | None
    counts: Mapping[tuple[int, int], int]


class Hotness(NamedTuple):
    """Counts by (layer, expert), and where they came from.

    `token_count` and `request_count` are None where they are not known. `held_out` is the part of
    `counts` that is held out. `origins` describe the traces. `digest` is the file's.
    """

    path: str
    counts: Mapping[tuple[int, int], int]
    token_count: int | None
    digest: int
    request_count: int | None = None
    held_out: HeldOut | None = None
    origins: tuple[dict[str, Any], ...] = ()
    coverage: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Give the provenance as the manifest holds it."""
        return {
            "digest": digest.to_text(self.digest),
            "token_count": self.token_count,
            "request_count": self.request_count,
            "selection_count": sum(self.counts.values()),
            "origins": list(self.origins),
            "coverage": self.coverage,
        }

    def learned(self) -> dict[tuple[int, int], int]:
        """Give the counts without what is held out."""
        held = self.held_out.counts if self.held_out else {}
        return {key: count - held.get(key, 0) for key, count in self.counts.items()}

    def check_fits(self, shape: ModelShape) -> None:
        """Raise TraceError where the counts name a layer or an expert that the model has not."""
        model = shape.expert_counts
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
    facts = _Facts(path)
    counts: dict[tuple[int, int], int] = {}
    held_out: dict[tuple[int, int], int] = {}
    is_halved = False
    lines = io.BytesIO(data.removeprefix(codecs.BOM_UTF8))
    for number, raw in enumerate(lines, 1):
        place = f"line {number}"
        line = _text(raw, place, path)
        if number > MAX_LINES:
            raise TraceError("too many lines", path=path, expected=f"<= {MAX_LINES}")
        if not line or line in _HEADINGS:
            continue
        if line.startswith("#"):
            facts.take(line, place)
            continue
        key, count, held = _entry(line, place, path)
        if key in counts:
            problem = f"layer {key[0]} expert {key[1]} stands twice"
            raise TraceError(problem, path=path, place=place)
        if counts and is_halved != (held is not None):
            raise TraceError("not as many columns as before", path=path, place=place, found=line)
        is_halved = held is not None
        counts[key] = count
        if held:
            held_out[key] = held
    if not counts:
        raise TraceError("no counts in it", path=path, expected=f"lines of {_HEADINGS[0]}")
    return Hotness(
        path=path,
        counts=counts,
        token_count=facts.numbers.get("tokens"),
        digest=digest.of(data),
        request_count=facts.numbers.get("requests"),
        held_out=facts.held_out(held_out) if is_halved else None,
        origins=tuple(facts.origins),
    )


def is_hotness(head: bytes) -> bool:
    """Say whether a file that begins with `head` is to be read as a hotness file."""
    rows = [line.strip() for line in head.removeprefix(codecs.BOM_UTF8).splitlines()]
    rows = [row for row in rows if row and not row.startswith(b"#")]
    first = rows[0].replace(b" ", b"") if rows else b""
    return first.startswith(b"layer,expert,count") or (
        re.match(rb"\d+,\d+,", first) is not None or (not rows and head.lstrip().startswith(b"#"))
    )


def encode(hotness: Hotness) -> bytes:
    """Write a hotness file; the same counts from the same traces give the same bytes."""
    facts = {"tokens": hotness.token_count, "requests": hotness.request_count}
    lines = [f"# {name}={value}" for name, value in facts.items() if value is not None]
    held = hotness.held_out
    if held is not None:
        lines.append(f"# held_out={held.by}")
        if held.token_count is not None:
            lines.append(f"# held_out_tokens={held.token_count}")
    lines += [f"# origin={json.dumps(one, sort_keys=True)}" for one in hotness.origins]
    lines.append(_HEADINGS[held is not None])
    for (layer, expert), count in sorted(hotness.counts.items()):
        row = f"{layer},{expert},{count}"
        lines.append(row if held is None else f"{row},{held.counts.get((layer, expert), 0)}")
    return "\n".join([*lines, ""]).encode()


class _Facts:
    """What the comments of a hotness file state."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.numbers: dict[str, int] = {}
        self.origins: list[dict[str, Any]] = []
        self._by = "requests"

    def take(self, comment: str, place: str) -> None:
        """Take a comment; one that states no fact says nothing."""
        if match := _FACT.match(comment):
            name, text = match[1], match[2]
            if not re.fullmatch(r"\d{1,15}", text, re.ASCII) or name in self.numbers:
                is_second = name in self.numbers
                what = name.removesuffix("s").replace("_", " ")
                raise TraceError(
                    f"a second {what} count" if is_second else f"not a {what} count",
                    path=self._path,
                    place=place,
                    expected=f"# {name}=N, once",
                    found=comment,
                )
            self.numbers[name] = int(text)
        elif match := _HALVES.match(comment):
            self._by = match[1]
        elif match := _ORIGIN.match(comment):
            self.origins.append(self._origin(match[1], place))

    def _origin(self, text: str, place: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise TraceError("not an origin", path=self._path, place=place) from None
        return dict(found)

    def held_out(self, counts: dict[tuple[int, int], int]) -> HeldOut:
        """Give the held-out half."""
        return HeldOut(self._by, self.numbers.get("held_out_tokens"), counts)


def _text(raw: bytes, place: str, path: str) -> str:
    if len(raw) > MAX_LINE_LENGTH:
        expected = f"<= {MAX_LINE_LENGTH} bytes"
        raise TraceError("line too long", path=path, place=place, expected=expected, found=len(raw))
    try:
        return raw.decode().strip()
    except UnicodeDecodeError:
        raise TraceError("not UTF-8 text", path=path, place=place) from None


def _entry(line: str, place: str, path: str) -> tuple[tuple[int, int], int, int | None]:
    match = _LINE.match(line)
    if not match:
        expected = _HEADINGS[0]
        raise TraceError("not a count", path=path, place=place, expected=expected, found=repr(line))
    count, held = int(match[3]), None if match[4] is None else int(match[4])
    if count > MAX_COUNT:
        expected = f"<= {MAX_COUNT}"
        raise TraceError(
            "count out of bounds", path=path, place=place, expected=expected, found=count
        )
    if held is not None and held > count:
        expected = f"<= {count}"
        raise TraceError(
            "more held out than counted", path=path, place=place, expected=expected, found=held
        )
    return (int(match[1]), int(match[2])), count, held
