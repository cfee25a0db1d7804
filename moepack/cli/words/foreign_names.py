"""Names of commands in llama.cpp, ollama and the hub, and the answers to them here."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

import click

from moepack.cli.words.typed_words import command_line, commands_below
from moepack.common.errors import RequestError
from moepack.common.path_hints import HUB_RUN, download_hint

_LEAST_LIKENESS = 0.75

_COMMANDS: Mapping[str, str] = {
    name: command
    for command, names in {
        "run": "chat ask generate complete llama-cli llama llama-run main cli",
        "serve": "server llama-server",
        "inspect": "show info describe gguf-dump",
        "pack": "repack",
        "restore": "unpack",
        "verify": "check test validate",
        "bench": "benchmark llama-bench",
        "forecast": "estimate predict",
        "place": "plan fit offload",
        "export gguf": "merge",
    }.items()
    for name in names.split()
}
"""Commands of ours, by the names of others; the words after them stay."""

_FILES = "moepack keeps no list of models: a model is a file or folder that you name"
_DOWNLOAD = "a model of the hub is fetched when it is run:"
_ANSWERS: Mapping[str, tuple[str, ...]] = {
    name: tuple(answer)
    for names, *answer in (
        ("download get", _DOWNLOAD, HUB_RUN),
        ("ls models", _FILES, "moepack inspect MODEL.gguf"),
        ("rm cp", _FILES),
        ("ps stop", "nothing runs in the background: Ctrl-C ends moepack run and moepack serve"),
        ("create", "a pack is made from a GGUF:", "moepack pack MODEL.gguf -o NAME.moepack"),
        (
            "quantize llama-quantize",
            "moepack does not change weights; llama.cpp's llama-quantize does:",
            "llama-quantize MODEL.gguf NAME-Q4_K_M.gguf Q4_K_M",
        ),
        (
            "convert convert_hf_to_gguf.py",
            "llama.cpp's convert_hf_to_gguf.py makes a GGUF from safetensors; from a pack:",
            "moepack export gguf MODEL.moepack -o NAME.gguf",
        ),
        (
            "completion completions",
            "a shell completes after this line (zsh_source and fish_source for other shells):",
            'eval "$(_MOEPACK_COMPLETE=bash_source moepack)"',
        ),
        ("version", "it is an option:", "moepack --version"),
    )
    for name in names.split()
}
"""The reason why a command is missing here, and a line to type instead, by its name elsewhere."""


def unknown_command(
    group: click.Group, context: click.Context, words: Sequence[str]
) -> RequestError:
    """Return the error for a word that is no command of a group; `words` begin with it."""
    root = context.find_root().command
    assert isinstance(root, click.Group)
    path = " ".join(["moepack", *context.command_path.split()[1:]])
    problem = f"no such command{' of ' + path if group is not root else ''}: {words[0]}"
    error = RequestError(problem)
    for hint in list(_hints(root, words)) or [f"{path} --help lists the commands"]:
        error.add_note(hint)
    return error


def _hints(root: click.Group, words: Sequence[str]) -> Iterator[str]:
    """Yield lines for a command that has another name here, or is spelled wrongly."""
    typed, *rest = words
    name = typed.lower()
    own = {path.rpartition(" ")[2]: path for path, _ in commands_below(root)}
    paths = {**_COMMANDS, **own}
    download = download_hint(rest[0]) if rest and name in ("download", "get") else None
    if download is not None:
        yield download
    elif name in _ANSWERS:
        yield from _ANSWERS[name]
    elif name.startswith("llama-") and name not in paths:
        yield "llama.cpp's own program does, even with a model bigger than memory:"
        yield f"moepack run MODEL.gguf -- {name} -m {{}}"
    elif near := get_close_matches(name, paths, 1, _LEAST_LIKENESS):
        yield command_line(paths[near[0]], rest)
    elif typed.endswith(".gguf"):
        yield command_line("run", words)
