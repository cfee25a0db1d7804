"""Read the prompts of a recording from a file."""

import json
from contextlib import suppress

from moepack.common.errors import TraceError
from moepack.traces.compressed import TraceStream

MAX_LENGTH = 1 << 28
"""Most bytes of a file of prompts."""
_HINT = 'give one prompt a line, or JSON lines: a string or {"prompt": string}'


def read_prompts(path: str) -> list[str]:
    """Read prompts: a text with one a line, or JSON lines, each a string or {"prompt": string}.

    Blank lines are skipped. The first other line decides: one that begins with `{` or is a
    JSON string is JSON. May be compressed. Raises TraceError for a file without prompts or a line
    that is none, with its number, and for another encoding than UTF-8; MachineError for a file
    that cannot be read.
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
    numbered = [
        (number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not numbered:
        raise TraceError("no prompts", path=path, hint=_HINT)
    if _is_json(numbered[0][1]):
        return [_json_prompt(line, path, f"line {number}") for number, line in numbered]
    return [line for _, line in numbered]


def _is_json(line: str) -> bool:
    with suppress(ValueError, RecursionError):
        return line.lstrip().startswith("{") or isinstance(json.loads(line), str)
    return False


def _json_prompt(line: str, path: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}", path=path, place=place) from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt.strip():
        problem = "an empty prompt" if isinstance(prompt, str) else "not a prompt"
        raise TraceError(problem, path=path, place=place, hint=_HINT)
    return prompt
