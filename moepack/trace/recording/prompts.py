"""Read the prompts of a recording from a file."""

import json
from collections.abc import Callable
from contextlib import suppress

from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream

MAX_LENGTH = 1 << 28
"""Of a file of prompts, in bytes."""
_HINT = 'give one prompt a line, or JSON lines: a string or {"prompt": string}'


def read_prompts(path: str) -> list[str]:
    """Read prompts: a text with one a line, or JSON lines, each a string or {"prompt": string}.

    Blank lines are skipped. The first other line tells which: one that begins with `{` or is a
    JSON string is JSON. May be compressed. Raises TraceError for a file without prompts or a line
    that is none, with its number, and for what is not UTF-8; MachineError where it cannot be read.
    """
    with TraceStream(path) as stream:
        data = stream.read_whole(MAX_LENGTH + 1)
    if len(data) > MAX_LENGTH:
        raise TraceError("too long", path=path, expected=f"up to {MAX_LENGTH} bytes")
    try:
        # Not splitlines: the line ends that only Unicode knows are part of a prompt.
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise TraceError("not UTF-8 text", path=path, place=f"byte {error.start}") from None
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]
    numbered = [(number, line) for number, line in numbered if line.strip()]
    if not numbered:
        raise TraceError("no prompts", path=path, hint=_HINT)
    prompt_of = _json_prompt if _is_json(numbered[0][1]) else str
    return [_prompt(prompt_of, line, path, number) for number, line in numbered]


def _prompt(prompt_of: Callable[[str], object], line: str, path: str, number: int) -> str:
    place = f"line {number}"
    try:
        prompt = prompt_of(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}", path=path, place=place) from None
    if not isinstance(prompt, str):
        raise TraceError("not a prompt", path=path, place=place, hint=_HINT)
    if not prompt.strip():
        raise TraceError("an empty prompt", path=path, place=place, hint=_HINT)
    return prompt


def _is_json(line: str) -> bool:
    with suppress(ValueError, RecursionError):
        return line.lstrip().startswith("{") or isinstance(json.loads(line), str)
    return False


def _json_prompt(line: str) -> object:
    value = json.loads(line)
    return value.get("prompt") if isinstance(value, dict) else value
