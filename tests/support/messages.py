"""The messages that layouts/FORMAT.md promises, from the tables of its section "Messages"."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import PackError

_FORMAT = (Path(__file__).parent.parent.parent / "layouts" / "FORMAT.md").read_text()
_WILD = {"N": r"[\d,]+", "…": r".*", "KEY": r"[\w.\[\]-]+", "SECTION": r"[\w.-]+"}


class Message(NamedTuple):
    """A place and a problem as the document writes them: with `N`, `…`, `KEY` and `SECTION`."""

    place: str
    problem: str

    def fits(self, error: PackError) -> bool:
        """Return whether an error is this message."""
        is_anywhere = self.place and not self.place.isprintable()
        place = is_anywhere or _pattern(self.place).fullmatch(error.place or "")
        return bool(place) and bool(_pattern(self.problem).fullmatch(error.problem))


def _pattern(text: str) -> re.Pattern[str]:
    pieces = re.split(r"(…|\bN\b|\bKEY\b|\bSECTION\b)", text)
    return re.compile("".join(_WILD.get(piece) or re.escape(piece) for piece in pieces), re.DOTALL)


def _messages() -> Iterator[tuple[str, Message]]:
    """Yield each message with its subject: manifest, shards, index."""
    text = _FORMAT[_FORMAT.index("\n## Messages\n") : _FORMAT.index("\n## GGML types\n")]
    about, before = "", [""]
    for line in text.splitlines():
        if line.startswith("Of "):
            about = "manifest" if "manifest" in line else "shards" if "kind 1" in line else "index"
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or len(cells) < 3 or cells[2] in ("problem", "---"):
            continue
        places = re.findall(r"`(.+?)`", cells[1]) or ["" if not cells[1] else "…"]
        if cells[1] == "as the first":
            places = before
        before = places
        for place in places:
            yield about, Message(place, cells[2].strip("`"))


MESSAGES: dict[str, list[Message]] = {"manifest": [], "shards": [], "index": []}
for _about, _message in _messages():
    MESSAGES[_about].append(_message)


def documented(error: PackError) -> Message | None:
    """Return the documented message of an error; None if there is none."""
    about = "manifest" if (error.path or "").endswith("manifest.json") else "index"
    return next((message for message in MESSAGES[about] if message.fits(error)), None)
