"""A program's arguments and environment: the model's path, the library, llama.cpp's variables."""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

_READING_WORDS = {"--no-mmap", "--direct-io", "-dio", "--mlock"}
_MODE_WORDS = {"--load-mode", "-lm"}
_LOADING_WORDS = _READING_WORDS | _MODE_WORDS | {"--mmap", "--no-direct-io", "-ndio"}
_MAPPING_MODES = {"mmap", "auto"}
_TRUE = {"1", "true", "on", "enabled"}
_FALSE = {"0", "false", "off", "disabled"}
_READING_SETTINGS: Mapping[str, Callable[[str], bool]] = {
    "LLAMA_ARG_LOAD_MODE": lambda value: value not in _MAPPING_MODES,
    "LLAMA_ARG_MMAP": lambda value: value in _FALSE,
    "LLAMA_ARG_NO_MMAP": lambda value: True,
    "LLAMA_ARG_MLOCK": lambda value: value in _TRUE,
    "LLAMA_ARG_DIO": lambda value: value in _TRUE,
}
"""Variables about loading, and whether a model is read whole with a value of theirs."""
_REPACKING_WORDS = {"--repack", "--no-repack", "-nr"}
_REPACKING_NAMES = {"LLAMA_ARG_REPACK", "LLAMA_ARG_NO_REPACK"}
_TEXT_WORDS = {"-p", "--prompt", "-sys", "--system-prompt", "-r", "--reverse-prompt"}
_TEXT_WORDS |= {"--in-prefix", "--in-suffix", "--grammar", "-j", "--json-schema", "--api-key"}
_TEXT_WORDS |= {"--chat-template", "--chat-template-kwargs", "--reasoning-budget-message"}
_TEXT_WORDS |= {"-a", "--alias", "--dry-sequence-breaker"}
"""Options whose values are texts, which may look like options."""
_SHELLS = {"sh", "ash", "bash", "dash", "zsh", "ksh", "mksh", "fish", "csh", "tcsh"}
_RUNS_TEXT = re.compile("-[A-Za-z]*c[A-Za-z]*")
"""A shell's `-c`, alone or among other letters, as in `-lc`."""
_LLAMA_PROGRAM = re.compile("llama-[a-z]+(-[a-z]+)*")
_OTHER_SOURCES = {"-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo"}
_OTHER_SOURCES |= {"--models-dir", "--models-preset", "-h", "--help", "--version"}
"""Options with which llama.cpp's programs need no path of a model."""
_INTEGER = re.compile("-?[0-9]+")
_LEAST_BATCH = 32
"""With a batch of one token llama.cpp's server aborts."""


class Option:
    """An option of llama.cpp's programs: its words, which stand in a text, and its variable."""

    def __init__(self, words: str, variable: str) -> None:
        self.words, self.variable = frozenset(words.split()), variable

    def is_set(self, command: Sequence[str]) -> bool:
        """Return whether a command of llama.cpp, or a variable, sets it."""
        names = {name for name, _ in option_values(command)}
        return bool(names & self.words) or self.variable in os.environ

    def text(self, command: Sequence[str]) -> str | None:
        """Return the last value of the option, or else of the variable."""
        values = [value for name, value in option_values(command) if name in self.words]
        return values[-1] if values else os.environ.get(self.variable)

    def number(self, command: Sequence[str]) -> int | None:
        """Return a positive number of the option, or else of the variable."""
        number = self.integer(command)
        return number if number is not None and number > 0 else None

    def integer(self, command: Sequence[str]) -> int | None:
        """Return the integer of the option, or else of the variable, 0 and negative ones too."""
        values = [value for name, value in option_values(command) if name in self.words]
        numbers = [value for value in values if _INTEGER.fullmatch(value)]
        value = numbers[-1] if numbers else os.environ.get(self.variable, "")
        return int(value) if _INTEGER.fullmatch(value) else None


CONTEXT = Option("-c --ctx-size", "LLAMA_ARG_CTX_SIZE")
"""Without a number, the context is the model's own."""
THREADS = Option("-t --threads", "LLAMA_ARG_THREADS")
"""Without a number, threads are as many as cores."""
TEMPLATES = (
    Option("--chat-template", "LLAMA_ARG_CHAT_TEMPLATE"),
    Option("--chat-template-file", "LLAMA_ARG_CHAT_TEMPLATE_FILE"),
)
SLOTS, USUAL_SLOTS = Option("-np --parallel", "LLAMA_ARG_N_PARALLEL"), 4
"""And llama.cpp's number of them, if no option sets it."""
_BATCHES = {
    Option("-b --batch-size", "LLAMA_ARG_BATCH"): 2048,
    Option("-ub --ubatch-size", "LLAMA_ARG_UBATCH"): 512,
}
"""With llama.cpp's defaults."""


def without(words: Sequence[str], options: Iterable[Option]) -> list[str]:
    """Return `words` for a program of llama.cpp without some options, each of which has a value."""
    names = frozenset().union(*(option.words for option in options))
    kept, is_value = [], False
    for word in words:
        if is_value:
            is_value = False
            continue
        name, sign, _ = word.partition("=")
        if name in names:
            is_value = not sign
        else:
            kept.append(word)
    return kept


def fill_in(arguments: Sequence[str], model_path: str) -> list[str]:
    """Return `arguments` with the model's path for `{}`: a whole argument, or all behind a `=`.

    `{}` anywhere else stays, since code and JSON are full of it; such code finds the path in the
    variable MOEPACK_MODEL. A literal argument `{}` is written `{{}}`.
    """
    filled = []
    for argument in arguments:
        for text, replacement in (("{}", model_path), ("{{}}", "{}")):
            if argument == text or argument.endswith(f"={text}"):
                argument = argument.removesuffix(text) + replacement
                break
        filled.append(argument)
    return filled


def find_misled_program(command: Sequence[str], paths: Iterable[Path]) -> str | None:
    """Return the program of llama.cpp in a command that surely gets none of the model's `paths`."""
    words = [*_words(command), os.environ.get("LLAMA_ARG_MODEL", "")]
    program = next(filter(_is_llama_program, words), None)
    if any(name in _OTHER_SOURCES for name, _ in option_values(command)):
        return None
    if any("MOEPACK_MODEL" in word for word in words) or fill_in(words, "") != words:
        return None
    files = [file for path in paths if (file := _file_at(path)) is not None]
    is_named = any(_file_at(word.partition("=")[2] or word) in files for word in words)
    return None if is_named else program


def _is_llama_program(word: str) -> bool:
    # Not a script of that name, which may pass on the model's path.
    path = shutil.which(word) if _LLAMA_PROGRAM.fullmatch(os.path.basename(word)) else None
    if path is None:
        return False
    try:
        with open(path, "rb") as file:
            return file.read(2) != b"#!"
    except OSError:
        return False


def _file_at(path: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
        return status.st_dev, status.st_ino
    except (OSError, ValueError):
        return None


def llama_variables(command: Sequence[str]) -> dict[str, str]:
    """Return variables that make llama.cpp's programs map a model, and repack none of its weights.

    What the user set by an option or a variable is left out. Programs older than a variable do not
    read it: LLAMA_ARG_LOAD_MODE is of July 2026 (before, mapping was the default), LLAMA_ARG_REPACK
    of December 2025.
    """
    names = {name for name, _ in option_values(command)}
    variables = {}
    if not names & _LOADING_WORDS and not os.environ.keys() & _READING_SETTINGS.keys():
        variables["LLAMA_ARG_LOAD_MODE"] = "mmap"
    if not names & _REPACKING_WORDS and not os.environ.keys() & _REPACKING_NAMES:
        variables["LLAMA_ARG_REPACK"] = "off"
    return variables


def waiting_variables() -> dict[str, str]:
    """Return variables with which waiting threads leave the processors to reading.

    Threads of OpenMP spin for milliseconds by default: as long as an expert takes to be read. With
    1,000 turns they meet each other between two products, and sleep while experts are read; the
    policy alone, which other libraries than libgomp know, makes them sleep at once. Variables of
    the user stay (libgomp's documentation).
    """
    variables = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
    return {} if os.environ.keys() & variables.keys() else variables


def single_text_options(context: int, threads: int | None, micro_batch: int) -> list[str]:
    """Return options of llama-server for one text at a time, without a cache of earlier texts.

    `context` is tokens, `micro_batch` a prompt's tokens that are computed at once. Batches are no
    longer than needed: of a cancelled prompt whole ones are kept.
    """
    words = ["-c", str(context), "-np", "1", "--cache-ram", "0"]
    words += ["-b", str(max(micro_batch, _LEAST_BATCH)), "-ub", str(micro_batch)]
    return words if threads is None else [*words, "-t", str(threads)]


def micro_batch(command: Sequence[str]) -> int:
    """Return the tokens that a command computes at once: the lesser of batch and micro-batch."""
    return min(option.number(command) or usual for option, usual in _BATCHES.items())


def says_micro_batch(command: Sequence[str]) -> bool:
    """Return whether a command of llama.cpp sets its batch or micro-batch."""
    return any(option.number(command) for option in _BATCHES)


def experts_used(command: Sequence[str], architecture: str) -> int | None:
    """Return the experts that a token uses in each layer by a command's `--override-kv`.

    llama.cpp has no variable for it, and takes the first of several.
    """
    prefix = f"{architecture}.expert_used_count=int:"
    for name, value in option_values(command):
        for override in value.split(",") if name == "--override-kv" else ():
            number = override.removeprefix(prefix)
            if number != override and number.isdecimal():
                return int(number)
    return None


def find_reading_option(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the option or variable by which llama.cpp reads or locks the whole model."""
    options = list(option_values(command))
    for name, value in options:
        if name in _READING_WORDS:
            return name
        if name in _MODE_WORDS and value and value not in _MAPPING_MODES:
            return f"{name} {value}"
    if any(name in _LOADING_WORDS for name, _ in options):
        return None  # options win over variables
    for variable, reads_whole in _READING_SETTINGS.items():
        if variable in environment and reads_whole(environment[variable]):
            return f"{variable}={environment[variable]}"
    return None


def option_values(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command, each with its value, or else with the next word."""
    is_text = False
    for word, following in pairwise([*_words(command), ""]):
        if is_text:
            is_text = False
            continue
        name, sign, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")  # as llama.cpp reads it
        if name.startswith("-"):
            is_text = name in _TEXT_WORDS and not sign
            yield name, value if sign else following


def _words(command: Sequence[str]) -> list[str]:
    """Return the words of a command, with those of the text that a shell runs (`sh -c TEXT`)."""
    for start, word in enumerate(command):
        if os.path.basename(word) not in _SHELLS:
            continue
        for number in range(start + 1, len(command) - 1):
            previous, option = command[number - 1 : number + 1]
            if _RUNS_TEXT.fullmatch(option):
                text = _words(_split(command[number + 1]))
                return [*command[: number + 1], *text, *command[number + 2 :]]
            if not option.startswith(("-", "+")) and not previous.endswith("o"):  # -eo pipefail
                break
    return list(command)


def _split(text: str) -> list[str]:
    """Split a text into words as a shell does; `;`, `&&` and the like are words too."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:  # an open quotation
        return text.split()
