"""What people type behind `moepack run MODEL`: a prompt, or a program without its `--`."""

import os
import shutil
from collections.abc import Iterator, Sequence

import click

from moepack.cli.typed_words import MODEL_OPTIONS, Word, command_line, read_words

_PROGRAMS = ("llama-", "llama_")
_OTHER_PROGRAMS = frozenset(
    ("llama", "llamafile", "ollama", "koboldcpp", "lms", "python", "python3", "node", "npx", "uvx")
)


def refuse_program(context: click.Context, command: click.Command, words: list[str]) -> list[str]:
    """Return the words. Raises Mistyped for a program that has no `--` before it."""
    typed = read_words(command, words)
    if "--" not in words:
        for place in _program_places(typed):
            _check_program(context, words, typed, place)
    elif command.name == "run" and not any(word.kind == "argument" for word in typed):
        place = len(typed)
        line = command_line("run", _with_model(typed, words[place + 1 :], words[:place]))
        raise _mistyped(context, "the model comes before --", line)
    return words


def prompt_as_option(context: click.Context, command: click.Command, words: list[str]) -> list[str]:
    """Return the words with a prompt that is an argument, as ollama has it, behind `-p`.

    That is the last argument behind a model, if it has a space in it and no file has that name.
    Raises Mistyped for a prompt that is not quoted.
    """
    typed = read_words(command, words)
    places = [place for place, word in enumerate(typed) if word.kind == "argument"]
    has_prompt = any(word.name in ("-p", "--prompt", "-f", "--file") for word in typed)
    if "--" in words or len(places) < 2 or has_prompt:
        return words
    last = places[-1]
    if _is_prompt(typed[last].text):
        return [*words[:last], "-p", *words[last:]]
    _check_unquoted(context, words, typed, places)
    return words


def _mistyped(context: click.Context, problem: str, *hints: str) -> click.UsageError:
    from moepack.cli.usage import Mistyped

    return Mistyped(problem, *hints, context=context)


def _program_places(typed: Sequence[Word]) -> Iterator[int]:
    """Yield where a program may stand: first, or behind models and values that are not known."""
    count = 0
    for place, word in enumerate(typed):
        if word.kind != "argument" or (place and _is_foreign_option(typed[place - 1])):
            continue
        yield place
        count += 1
        if count > 1 and not _may_be_path(word.text):
            return


def _is_foreign_option(word: Word) -> bool:
    return word.kind == "option" and word.option is None


def _is_prompt(text: str) -> bool:
    """Return whether a text with a space is no path: nothing is there, nor the folder for it."""
    folder = os.path.dirname(os.path.expanduser(text))
    is_path = os.path.lexists(text) or (folder not in ("", "/") and os.path.isdir(folder))
    return " " in text.strip() and not is_path


def _check_unquoted(
    context: click.Context, words: Sequence[str], typed: Sequence[Word], places: Sequence[int]
) -> None:
    """Raise Mistyped for a prompt that is not quoted: words behind a model that are no files."""
    behind = [place for place in places[1:] if not _may_be_path(typed[place].text)]
    if not os.path.exists(typed[places[0]].text) or len(behind) < len(places) - 1:
        return
    prompt = " ".join(typed[place].text for place in behind)
    others = [text for place, text in enumerate(words) if place not in behind]
    line = command_line("run", [*others, "-p", prompt])
    raise _mistyped(context, "a prompt comes behind -p, in quotes", line)


def _may_be_path(text: str) -> bool:
    has_ending = os.path.splitext(text)[1] not in ("", ".")
    return os.path.lexists(text) or has_ending or not set("/\\~:*").isdisjoint(text)


def _check_program(
    context: click.Context, words: Sequence[str], typed: Sequence[Word], place: int
) -> None:
    """Raise Mistyped where an argument is a program that is to run."""
    program = typed[place].text
    after = words[place + 1 :]
    if not _is_program(program, after):
        return
    line = command_line("run", _with_model(typed[:place], words[place:], words[:place]))
    raise _mistyped(context, f"a program comes behind --: {program}", line)


def _with_model(typed: Sequence[Word], program: Sequence[str], before: Sequence[str]) -> list[str]:
    """Return the words for `run` with a program behind `--`, and the model before it."""
    if any(word.kind == "argument" for word in typed):
        return [*before, "--", *program]
    place = next((n for n, word in enumerate(program[:-1]) if word in MODEL_OPTIONS), None)
    if place is None:
        return ["model.gguf", *before, "--", *program]
    filled = [*program[: place + 1], "{}", *program[place + 2 :]]
    return [program[place + 1], *before, "--", *filled]


def _is_program(text: str, after: Sequence[str]) -> bool:
    name = os.path.basename(text).removesuffix(".exe")
    if os.path.isdir(text) or text.endswith((".gguf", ".moepack")) or " " in name:
        return False
    if name.startswith(_PROGRAMS) or name in _OTHER_PROGRAMS:
        return True
    if "/" in text and os.path.isfile(text) and os.access(text, os.X_OK):
        return True
    return "{}" in after and shutil.which(text) is not None
