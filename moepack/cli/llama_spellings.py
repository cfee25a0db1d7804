"""Options as people know them from llama.cpp: what `run` and `serve` make of them.

Most are passed on to llama.cpp's server. Some have another name here, some say what happens anyway,
and the rest is answered with what to type instead.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import click

from moepack.cli.run_words import is_prompt
from moepack.cli.terminal import complain
from moepack.errors import RequestError
from moepack.escaping import shell_words
from moepack.path_hints import download_folder, download_hint

Words = Sequence[str]


class Spelling(NamedTuple):
    """What becomes of an option of llama.cpp, with as many values as it takes.

    It has another name here (`name`), or is answered (`problem`, `hint`), noted, or left out. With
    nothing of that it is passed on.
    """

    values: int = 1
    name: str | None = None
    problem: str | None = None
    hint: str = ""
    note: str | None = None
    is_left_out: bool = False
    has_switch: bool = False
    """Whether its value, `on` or `off`, may be missing, as it was once a flag."""


class Translated(NamedTuple):
    """Words for moepack, and those for llama.cpp's server."""

    words: list[str]
    passed_on: list[str]


_PASSED_ON = """
    -ctk --cache-type-k -ctv --cache-type-v -tb --threads-batch -C --cpu-mask -Cr --cpu-range
    --cpu-strict --prio --poll --numa --rope-scaling --rope-scale --rope-freq-base
    --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor
    --yarn-beta-slow --yarn-beta-fast --override-kv --lora
    --lora-scaled --samplers --sampler-seq --repeat-last-n --presence-penalty --frequency-penalty
    --typical --typical-p --top-n-sigma --xtc-probability --xtc-threshold --dry-multiplier
    --dry-base --dry-allowed-length --dry-penalty-last-n --dynatemp-range --dynatemp-exp --mirostat
    --mirostat-lr --mirostat-ent --logit-bias -l --grammar --grammar-file -j --json-schema -jf
    --json-schema-file --reasoning-format --reasoning-budget --chat-template-kwargs --keep
"""
_PASSED_ON_FLAGS = """
    --swa-full --ignore-eos --context-shift --no-context-shift --no-jinja
    --no-prefill-assistant --log-disable
"""
_SERVED = """
    -b --batch-size -ub --ubatch-size -np --parallel -n --predict --n-predict --temp --temperature
    --top-k --top-p --min-p --repeat-penalty -s --seed --api-key-file --ssl-key-file
    --ssl-cert-file --slot-save-path --cors-origins -to --timeout --threads-http --cache-reuse
    --cache-ram -cram -sps --slot-prompt-similarity --path --media-path --api-prefix --pooling
    --chat-template --chat-template-file --tools
"""
_SERVED_FLAGS = """
    -cb --cont-batching -nocb --no-cont-batching --metrics --slots --no-slots --props --no-ui
    --no-webui --embedding --embeddings --rerank --reranking --kv-unified -kvu --no-kv-unified
    --cache-prompt --no-cache-prompt
"""

_GPU = Spelling(
    problem="the llama.cpp that comes with moepack computes on the processor",
    hint="for a GPU: moepack run {model} -- llama-server -m {{}} {option}",
)
_GPU_FLAG = _GPU._replace(values=0)
_WHOLE = Spelling(
    values=0,
    problem="llama.cpp would read or lock the whole model, and experts come when they are chosen",
    hint="leave it out; --memory says how much of the model may be in memory",
)
_HUB = Spelling(
    problem="moepack downloads nothing yet",
    hint="hf download OWNER/NAME --include '*Q4_K_M*' --local-dir FOLDER, then: "
    "moepack {command} FOLDER",
)
_LEFT_OUT = Spelling(values=0, is_left_out=True)


def _rows(names: str, spelling: Spelling) -> dict[str, Spelling]:
    return dict.fromkeys(names.split(), spelling)


_BOTH: dict[str, Spelling] = {
    **_rows(_PASSED_ON, Spelling()),
    **_rows(_PASSED_ON_FLAGS, Spelling(0)),
    **_rows("-fa --flash-attn", Spelling(has_switch=True)),
    **_rows("--ctx-size", Spelling(name="--context")),
    **_rows("-ngl --gpu-layers --n-gpu-layers -ts --tensor-split -sm --split-mode", _GPU),
    **_rows("-mg --main-gpu -dev --device -ncmoe --n-cpu-moe -ot --override-tensor", _GPU),
    **_rows("-cmoe --cpu-moe -nkvo --no-kv-offload", _GPU_FLAG),
    **_rows("--no-mmap --mlock -dio --direct-io", _WHOLE),
    **_rows("-lm --load-mode", _WHOLE._replace(values=1)),
    **_rows("-hf -hfr --hf-repo -hff --hf-file -mu --model-url -dr --docker-repo", _HUB),
    **_rows("--jinja --mmap --no-warmup --no-repack -nr -ndio --no-direct-io", _LEFT_OUT),
}
RUN: dict[str, Spelling] = {
    **_BOTH,
    **_rows("--predict --n-predict", Spelling(name="--tokens")),
    **_rows("-sys --system-prompt", Spelling(name="--system")),
    **_rows("--ubatch-size", Spelling(name="--micro-batch")),
    **_rows("-no-cnv --no-conversation", Spelling(0, name="--raw")),
    **_rows("-cnv --conversation -i --interactive -if --interactive-first", _LEFT_OUT),
    **_rows("-st --single-turn --no-display-prompt --simple-io -mli --multiline-input", _LEFT_OUT),
    **_rows("-co --color", Spelling(has_switch=True, is_left_out=True)),
    **_rows(
        "-b --batch-size",
        Spelling(note="a prompt is computed in micro-batches (-ub): {option} changes nothing here"),
    ),
    **_rows(
        "-np --parallel",
        Spelling(
            problem="`run` computes one text at a time", hint="moepack serve {model} -- {option}"
        ),
    ),
    **_rows(
        "--port --host --api-key",
        Spelling(problem="`run` serves nobody", hint="moepack serve {model} {option}"),
    ),
}
SERVE: dict[str, Spelling] = {
    **_BOTH,
    **_rows(_SERVED, Spelling()),
    **_rows(_SERVED_FLAGS, Spelling(0)),
    **_rows("-a --alias", Spelling(name="--name")),
}
_MODEL = ("-m", "--model")
_SWITCHES = {
    *("on", "enabled", "true", "1", "off", "disabled", "false", "0", "auto", "-1"),
}
_BEFORE = {
    **dict.fromkeys(_MODEL, ""),
    "--host": "--host",
    "--port": "--port",
    "--api-key": "--api-key",
    **dict.fromkeys(("-a", "--alias"), "--name"),
}
"""What of llama-server's options stands before the dashes, and how."""
_EITHER_SIDE = {
    **dict.fromkeys(("-c", "--ctx-size"), "--context"),
    **dict.fromkeys(("-t", "--threads"), "--threads"),
}


def translate(
    command: click.Command, words: Words, spellings: Mapping[str, Spelling]
) -> Translated:
    """Return words for moepack, and those for llama.cpp's server, of what was typed.

    Raises RequestError for what is answered with something else to type.
    """
    return _Translation(command, words, spellings).run()


def check_rest(models: Words, words: Words, ours: Mapping[str, int | None] = {}) -> None:
    """Raise RequestError for options behind `--` that `serve` has itself, or cannot have there.

    `ours` are values before `--` of options that may stand on either side, by their names here.
    """
    for place, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name in _BEFORE:
            count = 1 if sign else 2
            value = value if sign else "".join(words[place + 1 : place + 2])
            rest = [*words[:place], *words[place + count :]]
            before = [value] if name in _MODEL else [*models, _BEFORE[name], value]
            line = ["moepack", "serve", *before, *(["--", *rest] if rest else [])]
            problem = f"{name} goes before --, not behind it"
            raise RequestError(problem, hint=shell_words(line))
        own = _EITHER_SIDE.get(name)
        if own is not None and ours.get(own) is not None:
            raise RequestError(f"{name} stands before -- and behind it", hint="name it once")
        if SERVE.get(name) is _HUB:
            raise RequestError(f"{name}: {_HUB.problem}", hint=_HUB.hint.format(command="serve"))


class _Translation:
    def __init__(
        self, command: click.Command, words: Words, spellings: Mapping[str, Spelling]
    ) -> None:
        self._command, self._spellings = command, spellings
        self._left = list(words)
        self._own = {
            name: 0 if option.is_flag or option.count else option.nargs
            for option in command.params
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        self._words: list[str] = []
        self._passed_on: list[str] = []
        self._models: list[str] = []
        self._answers: list[Callable[[str], RequestError]] = []
        self._has_unknown = False

    def run(self) -> Translated:
        while self._left:
            word = self._left.pop(0)
            name, sign, value = word.partition("=") if word.startswith("-") else (word, "", "")
            if name in _MODEL:
                self._take_model(name, value if sign else None)
            elif name in self._spellings and name not in self._own:
                self._take(name, value if sign else None)
            else:
                self._words.append(word)
                if name in self._own and not sign:
                    self._words += self._values(self._own[name])
                elif word.startswith("-"):
                    self._has_unknown = self._has_unknown or not self._is_own(name)
                elif not is_prompt(word):
                    self._models.append(word)
        if not self._has_unknown:  # whose value may be what looks like a model
            for answer in self._answers:
                raise answer(shlex.quote(self._models[0]) if self._models else "MODEL")
        return Translated(self._words, self._passed_on)

    def _is_own(self, name: str) -> bool:
        """Return whether an option is the command's, also with its value joined to it: `-n5`."""
        return name in self._own or (not name.startswith("--") and name[:2] in self._own)

    def _values(self, count: int) -> list[str]:
        values, self._left = self._left[:count], self._left[count:]
        return values

    def _take_model(self, name: str, value: str | None) -> None:
        model = self._values(1) if value is None else [value]
        if not model:
            raise RequestError(f"{name} names no model", hint=f"{name} FILE")
        if self._models:
            problem = f"the model is named twice: {self._models[0]}, and {name} {model[0]}"
            self._answers.append(lambda _model: RequestError(problem, hint="name it once"))
        self._models += model
        self._words[:0] = model  # a prompt is behind it

    def _take(self, name: str, value: str | None) -> None:
        spelling = self._spellings[name]
        if value is not None and not spelling.values and spelling.problem is None:
            raise RequestError(f"{name} takes no value", found=value, hint=f"{name} alone")
        values = [value] if value is not None else self._values_of(spelling)
        option = shlex.join([name, *values])
        if spelling.problem is not None and not (spelling is _GPU and values == ["0"]):
            self._answers.append(lambda model: _answer(self._command, spelling, option, model))
        elif spelling.note is not None:
            complain("note", spelling.note.format(option=option))
        elif spelling.name is not None:
            self._words += [spelling.name, *values]
        elif not spelling.is_left_out and spelling is not _GPU:
            self._passed_on += [name, *values]

    def _values_of(self, spelling: Spelling) -> list[str]:
        if spelling.has_switch and self._left[:1] and self._left[0] not in _SWITCHES:
            return ["on"]
        return (
            (self._values(spelling.values) or ["on"])
            if spelling.has_switch
            else self._values(spelling.values)
        )


def _answer(command: click.Command, spelling: Spelling, option: str, model: str) -> RequestError:
    name, _, value = option.partition(" ")
    hint = spelling.hint.format(model=model, option=option, command=command.name)
    if spelling is _HUB and (download := download_hint(value)) is not None:
        hint = f"{download}; then: moepack {command.name} {download_folder(value) or 'FILE'}"
    return RequestError(f"{name}: {spelling.problem}", hint=hint)
