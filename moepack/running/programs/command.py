"""A program's arguments and environment: the model's path, the library, llama.cpp's variables."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

_READING_WORDS = {"--no-mmap", "--direct-io", "-dio", "--mlock"}
_MODE_WORDS = {"--load-mode", "-lm"}
_LOADING_WORDS = _READING_WORDS | _MODE_WORDS | {"--mmap", "--no-direct-io", "-ndio"}
_LOADING_NAMES = tuple(f"LLAMA_ARG_{name}" for name in ("LOAD_MODE", "MMAP", "NO_MMAP"))
_LOADING_NAMES += ("LLAMA_ARG_MLOCK", "LLAMA_ARG_DIO")
_REPACKING_WORDS = {"--repack", "--no-repack", "-nr"}
_REPACKING_NAMES = ("LLAMA_ARG_REPACK", "LLAMA_ARG_NO_REPACK")
_LEAST_BATCH = 32
"""With a batch of one token llama.cpp's server aborts."""
_MAPPING_MODES = {"mmap", "auto"}
_TRUE = {"1", "true", "on", "enabled"}
_FALSE = {"0", "false", "off", "disabled"}


class Option(NamedTuple):
    """An option of llama.cpp's programs with a number: its words, and its variable."""

    words: frozenset[str]
    variable: str

    def is_set(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether a command of llama.cpp, or a variable, sets it."""
        return bool(_words(arguments) & self.words) or self.variable in environment

    def number(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int | None:
        """Return the number of the option, or else of the variable; None for none, and for 0."""
        words = [word for argument in arguments for word in argument.replace("=", " ").split()]
        pairs = pairwise(words)
        values = [value for word, value in pairs if word in self.words and value.isdecimal()]
        value = values[-1] if values else environment.get(self.variable, "")
        return int(value) or None if value.isdecimal() else None


CONTEXT = Option(frozenset({"-c", "--ctx-size"}), "LLAMA_ARG_CTX_SIZE")
"""Without a number, the context is the model's own."""
THREADS = Option(frozenset({"-t", "--threads"}), "LLAMA_ARG_THREADS")
"""Without a number, threads are as many as cores."""
_BATCHES = {
    Option(frozenset({"-b", "--batch-size"}), "LLAMA_ARG_BATCH"): 2048,
    Option(frozenset({"-ub", "--ubatch-size"}), "LLAMA_ARG_UBATCH"): 512,
}
"""With llama.cpp's defaults."""


def fill_in(arguments: Sequence[str], model_path: str) -> list[str]:
    """Return `arguments` with the model's path for `{}`: a whole argument, or all behind a `=`.

    `{}` anywhere else stays, since code and JSON are full of it; shells' and programs' own code
    finds the path in the variable MOEPACK_MODEL. An argument `{}` that is meant is written `{{}}`.
    """
    filled = []
    for argument in arguments:
        for text, replacement in (("{}", model_path), ("{{}}", "{}")):
            if argument == text or argument.endswith(f"={text}"):
                argument = argument.removesuffix(text) + replacement
                break
        filled.append(argument)
    return filled


def extend_environment(
    environment: Mapping[str, str], additions: Mapping[str, str]
) -> dict[str, str]:
    """Return `environment` with `additions`; their LD_PRELOAD comes first."""
    preloaded = [
        names["LD_PRELOAD"] for names in (additions, environment) if names.get("LD_PRELOAD")
    ]
    extended = {**environment, **additions}
    return extended | {"LD_PRELOAD": ":".join(preloaded)} if preloaded else extended


def llama_variables(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make llama.cpp's programs map a model, and repack none of its weights.

    None is among them about which the user said anything, by an option or a variable. Programs
    older than a variable do not read it: LLAMA_ARG_LOAD_MODE is of July 2026 (before, mapping was
    the default), LLAMA_ARG_REPACK of December 2025.
    """
    words = _words(arguments)
    variables = {}
    if not words & _LOADING_WORDS and not environment.keys() & set(_LOADING_NAMES):
        variables["LLAMA_ARG_LOAD_MODE"] = "mmap"
    if not words & _REPACKING_WORDS and not environment.keys() & set(_REPACKING_NAMES):
        variables["LLAMA_ARG_REPACK"] = "off"
    return variables


def waiting_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which threads that wait leave the processor to who reads experts.

    Those of OpenMP spin by default, for milliseconds: as long as an expert takes to be read. With
    so few turns they meet each other between two products without sleep, and sleep while experts
    are read; a policy alone, which other libraries than libgomp know, has them sleep at once. None
    if the user said how they wait (libgomp's documentation).
    """
    variables = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
    return {} if environment.keys() & variables.keys() else variables


def single_text_options(context: int, threads: int | None, micro_batch: int) -> list[str]:
    """Return options of llama-server for one text at a time, and no memory of those before it.

    `context` is tokens, `micro_batch` those of a prompt that are computed at once. Batches are no
    longer than needed: a prompt that is left is computed up to the end of its batch.
    """
    words = ["-c", str(context), "-np", "1", "--cache-ram", "0"]
    words += ["-b", str(max(micro_batch, _LEAST_BATCH)), "-ub", str(micro_batch)]
    return words if threads is None else [*words, "-t", str(threads)]


def micro_batch(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return how many tokens a command of llama.cpp computes at once, as far as that is known.

    It is the least of the batch and the micro-batch, each by default llama.cpp's.
    """
    return min(
        option.number(arguments, environment) or default for option, default in _BATCHES.items()
    )


def says_micro_batch(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command of llama.cpp sets its batch or micro-batch."""
    return any(option.number(arguments, environment) for option in _BATCHES)


def find_reading_option(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the option or variable by which llama.cpp reads or locks the whole model.

    None without one. `--load-mode mmap` in its place helps.
    """
    words = [word for argument in arguments for word in argument.replace("=", " ").split()]
    for word, following in pairwise([*words, ""]):
        if word in _READING_WORDS:
            return word
        if word in _MODE_WORDS and following and following not in _MAPPING_MODES:
            return f"{word} {following}"
    if _words(arguments) & _LOADING_WORDS:
        return None  # options win over variables
    for name in _LOADING_NAMES:
        value = environment.get(name)
        if value is not None and _says_reading(name, value):
            return f"{name}={value}"
    return None


def _says_reading(name: str, value: str) -> bool:
    if name == "LLAMA_ARG_LOAD_MODE":
        return value not in _MAPPING_MODES
    if name == "LLAMA_ARG_NO_MMAP":
        return True
    return value in (_FALSE if name == "LLAMA_ARG_MMAP" else _TRUE)


def _words(arguments: Sequence[str]) -> set[str]:
    """Return the words of a command, those of commands for a shell among them."""
    return {word.partition("=")[0] for argument in arguments for word in argument.split()}
