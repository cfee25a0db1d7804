"""A command line as it was probably meant: each argument in its place, and what is missing."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import click

from moepack.cli.program import CommandWithRest
from moepack.cli.typed_words import (
    MODEL_OPTIONS,
    arguments_in,
    command_line,
    options_of,
    read_words,
    without_model_option,
)
from moepack.escaping import shell_word
from moepack.storage.pack_files import is_pack

_ARGUMENT = ""
_TABLES = {"table": _ARGUMENT, "model": "--model", "pack": "--model"}
_MODEL = {"model": _ARGUMENT, "folder": _ARGUMENT, "new": "-o", "table": "--hotness"}
_PLACES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "pack": _MODEL,
        "index": _MODEL,
        "verify": {"pack": _ARGUMENT, "model": "--source", "folder": "--source"},
        "restore": {"pack": _ARGUMENT, "new": "-o", "folder": "-o"},
        "export gguf": {"pack": _ARGUMENT, "new": "-o"},
        "rank": {"pack": _ARGUMENT, "table": "--hotness"},
        "mirror": {"pack": _ARGUMENT, "folder": _ARGUMENT},
        "mount": {"pack": _ARGUMENT, "folder": _ARGUMENT, "new": _ARGUMENT},
        "list": {"pack": _ARGUMENT, "model": _ARGUMENT, "number": "--layers"},
        "locate": {"pack": _ARGUMENT, "model": _ARGUMENT, "number": "--layer --expert"},
        "extract": {"pack": _ARGUMENT, "number": "--layer --expert", "new": "-o"},
        "bench": {"pack": _ARGUMENT, "model": "--source", "table": "--trace"},
        "trace import": {**_TABLES, "new": "-o"},
        "trace record": {
            **{"model": "--model", "pack": "--model", "folder": "--model"},
            **{"table": "--prompts", "new": "-o"},
        },
        "trace stats": _TABLES,
        "trace concentration": _TABLES,
        "simulate": _TABLES,
        "hotness": {"table": _ARGUMENT, "new": "-o", "pack": "--learned", "model": "--learned"},
        "forecast": {"model": _ARGUMENT, "pack": _ARGUMENT, "machine": "--machine"},
        "place": {"model": _ARGUMENT, "pack": _ARGUMENT, "machine": "--machine"},
        "machine": {"model": _ARGUMENT, "pack": _ARGUMENT, "new": "-o", "machine": "-o"},
        "doctor": {"model": _ARGUMENT, "pack": _ARGUMENT},
        "inspect": {"model": _ARGUMENT, "pack": _ARGUMENT, "folder": _ARGUMENT},
        "run": {"model": _ARGUMENT, "pack": _ARGUMENT, "folder": _ARGUMENT},
        "serve": {"model": _ARGUMENT, "pack": _ARGUMENT, "folder": _ARGUMENT},
    }
)
"""Where an argument belongs by what it is: among the arguments, or behind an option."""

_FIRST = ("pack", "model", "table", "folder", "new")
"""The order of arguments that are of several kinds."""

_WANTED: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "restore": ("-o", ("--in-place",)),
        "rank": ("--hotness", ("--learned",)),
        "hotness": ("-o", ("--learned",)),
        "forecast": ("--machine", ("--formula",)),
        "place": ("--machine", ("--ram", "--vram")),
        "simulate": ("--model", ()),
    }
)
"""What commands need beyond what click requires, and the options instead of which."""

_ENDINGS: Mapping[str, str] = MappingProxyType(
    {
        **{"pack": ".moepack", "index": ".index", "restore": "-shards", "export gguf": ".gguf"},
        **{"extract": ".bin", "trace import": ".moetrace", "trace record": ".moetrace"},
        **{"hotness": "-hotness.csv"},
    }
)
"""How the names end of what commands write."""

_SAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{"--layer": ("0",), "--expert": ("0",), "--prompts": ("prompts.txt",)},
        **{"--hotness": ("hot.csv",), "--machine": ("machine.toml",)},
    }
)
_KNOWN_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.(gguf|moepack|moetrace|index|csv|json|txt)/*\Z")
_SHARD = re.compile(r"-\d{5}-of-(?=\d{5}\.gguf)")
_NO_MODEL = re.compile("imatrix|mmproj|lora")


def rewrite(path: str, command: click.Command, words: Sequence[str]) -> list[str] | None:
    """Return the words for a command as they were probably meant.

    None where nothing is to be changed, or where an argument has no place that is known.
    """
    words = _own_words(command, words)
    typed = read_words(command, words)
    if not isinstance(command, CommandWithRest) and "--" in words:
        return None
    before = [word.text for word in typed]
    rest = list(words[len(before) :])
    given = {word.option for word in typed if word.option}
    arguments: list[tuple[int, str]] = []
    added: list[str] = []
    free = _Options(command, given)
    for text in arguments_in(typed):
        kind = _kind(text)
        places = _PLACES.get(path, {})
        target = places.get("new" if "gguf" in path and kind == "lost" else kind)
        if kind == "lost" and target is None:
            target = places.get("model")
        if target is None:
            return None
        name = free.take(target) if target else None
        if name is None and target:
            return None
        if name:
            added += [name, text]
        else:
            arguments.append((_FIRST.index(kind) if kind in _FIRST else 0, text))
    names = [text for _, text in sorted(arguments, key=lambda pair: pair[0])]
    names += _missing_arguments(path, command, names)
    options = [word.text for word in typed if word.kind != "argument"] + added
    options += list(_missing_options(path, free, names + [word.text for word in typed]))
    meant = [*names, *options, *rest]
    return None if sorted(meant) == sorted(words) and meant[:1] == list(words[:1]) else meant


def _own_words(command: click.Command, words: Sequence[str]) -> list[str]:
    """Return the words with each argument among the others: none behind `-m`, nor behind `--`."""
    if options_of(command).keys().isdisjoint(MODEL_OPTIONS):
        words = without_model_option(words)
    place = words.index("--") if "--" in words else len(words)
    has_rest = isinstance(command, CommandWithRest)
    if has_rest or any(word.startswith("-") for word in words[place + 1 :]):
        return list(words)
    return [*words[:place], *words[place + 1 :]]


def meant_lines(path: str, command: click.Command, words: Sequence[str]) -> list[str]:
    """Return the command line that was probably meant, where that is known; else what was typed.

    For what makes a GGUF of a pack, and is given a GGUF, it is why there is nothing to do.
    """
    model = gguf_already(path, command, words)
    if model is not None:
        return [f"{shell_word(model)} is a GGUF already; to run it:", command_line("run", [model])]
    return [command_line(path, rewrite(path, command, words) or list(words))]


def gguf_already(path: str, command: click.Command, words: Sequence[str]) -> str | None:
    """Return the GGUF that a command is to make a GGUF of; None where it is another command."""
    if path not in ("restore", "export gguf"):
        return None
    arguments = arguments_in(read_words(command, _own_words(command, words)))
    return next((text for text in arguments if _kind(text) == "model"), None)


class _Options:
    """The options of a command that are not given yet."""

    def __init__(self, command: click.Command, given: set[click.Option]) -> None:
        self._names = options_of(command)
        self._given = set(given)
        self.required = [
            option for option in dict.fromkeys(self._names.values()) if option.required
        ]

    def take(self, names: str) -> str | None:
        """Return the first of `names` that is free, and take it; None where none is."""
        for name in names.split():
            option = self._names.get(name)
            if option is not None and (option.multiple or option not in self._given):
                self._given.add(option)
                return name
        return None

    def is_given(self, name: str) -> bool:
        """Return whether an option is given."""
        return self._names.get(name) in self._given


def _kind(text: str) -> str:
    """Return what an argument is, by its name and by what lies there."""
    if text.isdecimal() and not os.path.exists(text):
        return "number"
    if text.endswith(".toml"):
        return "machine"
    if os.path.isdir(text):
        return "pack" if is_pack(Path(text)) else "folder"
    if not os.path.exists(text):
        return "lost" if text.endswith(".gguf") else "new"
    return "model" if text.endswith(".gguf") and not _is_imatrix(text) else "table"


def _is_imatrix(path: str) -> bool:
    return "imatrix" in os.path.basename(path)


def _missing_options(path: str, free: _Options, names: Sequence[str]) -> Iterator[str]:
    """Yield what is required and not given, with values that may be meant."""
    wanted = [max(option.opts, key=len) for option in free.required]
    name, instead = _WANTED.get(path, ("", ()))
    if name and not any(map(free.is_given, instead)):
        wanted.append(name)
    for name in wanted:
        free_name = free.take(name)
        if free_name is None:
            continue
        if free_name in ("-o", "--output"):
            yield from ("-o", output_name(path, names))
        elif free_name in _SAMPLES:
            yield from (free_name, *_SAMPLES[free_name])
        else:
            yield from (free_name, model_here() or "model.gguf")


def _missing_arguments(path: str, command: click.Command, names: Sequence[str]) -> list[str]:
    """Return what may be meant by arguments that are needed and not there."""
    required = [
        one
        for one in command.params
        if isinstance(one, click.Argument) and (one.required or path in ("pack", "forecast"))
    ]
    needed = [one.metavar or "" for one in required][len(names) :]
    return [sample_for(metavar) for metavar in needed]


def sample_for(metavar: str) -> str:
    """Return what may stand for an argument: what lies in this folder, else a usual name."""
    if metavar == "PACK":
        return pack_here() or "model.moepack"
    if metavar.startswith("SOURCE"):
        return model_here() or "model.gguf"
    return {"DIR": "shards", "TRACE...": "chat.moetrace", "FILE...": "chat.moetrace"}.get(
        metavar, metavar
    )


def output_name(path: str, names: Sequence[str]) -> str:
    """Return a name, of nothing that exists, for what a command would make of what is named."""
    first = next((name for name in names if _KNOWN_ENDING.search(name)), "model.gguf")
    stem = _KNOWN_ENDING.sub("", os.path.basename(first.rstrip("/")))
    return free_name(stem, _ENDINGS.get(path, ""))


def free_name(stem: str, ending: str) -> str:
    """Return a name of nothing that exists: `stem`, a number where one is needed, and `ending`."""
    name, count = f"{stem}{ending}", 1
    while os.path.exists(name):
        count += 1
        name = f"{stem}-{count}{ending}"
    return name


def model_here() -> str | None:
    """Return the first file of the longest model in this folder, None where there is none."""
    lengths: dict[str, int] = {}
    for path in sorted(Path().glob("*.gguf")):
        if path.is_file() and not _NO_MODEL.search(path.name):
            name = _SHARD.sub("-00001-of-", path.name)
            lengths[name] = lengths.get(name, 0) + path.stat().st_size
    return max(lengths, key=lambda name: lengths[name], default=None)


def pack_here() -> str | None:
    """Return a pack in this folder, None where there is none."""
    return next((one.name for one in sorted(Path().glob("*")) if is_pack(one)), None)
