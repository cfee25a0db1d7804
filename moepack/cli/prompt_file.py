"""Prompts from files."""

from moepack.errors import RequestError

MAX_PROMPT = 1 << 24
"""Characters of a prompt from a file: no context that there is has room for more."""


def read_prompt(path: str) -> str:
    """Return the text in a file. Raises RequestError where it cannot be read, or is too long."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            prompt = file.read(MAX_PROMPT + 1)
    except OSError as error:
        from moepack.path_hints import missing_hint

        problem = f"cannot read the prompt: {error.strerror}"
        hint = missing_hint(path) if isinstance(error, FileNotFoundError) else None
        raise RequestError(problem, path=path, hint=hint) from None
    if len(prompt) > MAX_PROMPT:
        expected = f"up to {MAX_PROMPT:,} characters"
        raise RequestError("the prompt is too long", path=path, expected=expected)
    return prompt
