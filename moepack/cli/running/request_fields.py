"""Options of llama.cpp that its server heeds only as fields of each request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moepack.common.errors import RequestError

_BIAS = re.compile(r"(\d+)([+-](?:\d+\.?\d*|inf))")


def split_fields(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return options without those for requests, and these as a request's fields.

    Raises RequestError for values that llama.cpp would refuse.
    """
    left: list[str] = []
    fields: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        reader = _READERS.get(word)
        if reader is None:
            left.append(word)
            continue
        value = next(rest, None)
        if value is None:
            raise RequestError(f"{word} has no value")
        for name, field in reader(word, value).items():
            fields[name] = [*fields.get(name, []), *field] if isinstance(field, list) else field
    return left, fields


def _schema(option: str, text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{option}: not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise RequestError(f"{option}: not a JSON schema", expected='{"type": …}', found=text)
    return {"json_schema": schema}


def _schema_file(option: str, path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "not text"
        raise RequestError(f"{option}: {problem}", path=path) from None
    return _schema(option, text)


def _bias(option: str, text: str) -> dict[str, Any]:
    match = _BIAS.fullmatch(text)
    if match is None:
        raise RequestError(f"{option}: not a token's bias", expected="15043+1", found=text)
    # The server takes `false` for a token that never comes.
    value: float | bool = False if match[2] == "-inf" else float(match[2])
    return {"logit_bias": [[int(match[1]), value]]}


_READERS: Mapping[str, Callable[[str, str], dict[str, Any]]] = {
    **dict.fromkeys(("-j", "--json-schema"), _schema),
    **dict.fromkeys(("-jf", "--json-schema-file"), _schema_file),
    **dict.fromkeys(("-l", "--logit-bias"), _bias),
}
