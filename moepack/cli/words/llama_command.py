"""Commands that run llama.cpp: they take its options, and words for a program behind `--`.

Most options are passed on to llama.cpp's server. Some have another name here, some state what
happens anyway, and the rest is answered with a command line to type instead.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from moepack.cli.shared.terminal import complain
from moepack.cli.words.front import check_repeated, command_line
from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word
from moepack.common.path_hints import hub_address

_PROGRAMS = {
    *("llama-cli", "llama-server", "llama-bench", "llama-completion", "llama-perplexity"),
    *("llama-imatrix", "llama-run", "llama-simple", "llama-mtmd-cli", "llama-speculative"),
}
_MODEL_OPTIONS = ("-m", "--model")
"""llama.cpp's options for the model, which is an argument here."""
_SERVER_OPTION = "--server"
"""Ours, before a program's name or path."""
_SCHEMAS, _SCHEMA_FILES = ("-j", "--json-schema"), ("-jf", "--json-schema-file")
_BIASES = ("-l", "--logit-bias")
_BIAS = re.compile(r"(\d+)([+-](?:\d+\.?\d*|inf))")


class Spelling(NamedTuple):
    """The treatment of an option of llama.cpp that takes so many `values`.

    It has another name here (`name`), or is answered (`problem`, `hint`), noted, or left out. With
    none of these it is passed on. `has_switch`: its value, `on` or `off`, may be missing, since it
    was once a flag.
    """

    values: int = 1
    name: str | None = None
    problem: str | None = None
    hint: str = ""
    note: str | None = None
    is_left_out: bool = False
    has_switch: bool = False


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
    --spec-type --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min
    -md --model-draft --spec-draft-model
"""
_PASSED_ON_FLAGS = """
    --swa-full --ignore-eos --context-shift --no-context-shift --jinja --no-jinja
    --no-prefill-assistant --log-disable
"""
_SERVED = """
    -b --batch-size -ub --ubatch-size -np --parallel -n --predict --n-predict --temp --temperature
    --top-k --top-p --min-p --repeat-penalty -s --seed --api-key-file --ssl-key-file
    --ssl-cert-file --slot-save-path -to --timeout --threads-http --cache-reuse
    --cache-ram -cram -sps --slot-prompt-similarity --path --media-path --api-prefix --pooling
    --chat-template --chat-template-file --tools
"""
_SERVED_FLAGS = """
    -cb --cont-batching -nocb --no-cont-batching --metrics --slots --no-slots --props --no-ui
    --no-webui --embedding --embeddings --rerank --reranking --kv-unified -kvu --no-kv-unified
    --cache-prompt --no-cache-prompt
"""

_GPU = Spelling(
    problem="moepack's own llama.cpp computes on the processor",
    hint="for a GPU: moepack run {model} -- llama-server -m {{}} {option}",
)
_GPU_FLAG = _GPU._replace(values=0)
_WHOLE = Spelling(
    values=0,
    problem="llama.cpp would read or lock the whole model, not just the selected experts",
    hint="leave it out; --memory says how much of the model may be in memory",
)
_HUB = Spelling(
    problem="a model on the hub has an address here",
    hint="moepack {command} hf://OWNER/NAME/Q4_K_M",
)
_HUB_OPTIONS = ("-hf", "-hfr", "--hf-repo")
_LEFT_OUT = Spelling(values=0, is_left_out=True)
_OTHER_MODELS = "-mm --mmproj"
_BEHIND = Spelling(problem="options of llama.cpp's programs come after --")


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
    **_rows("--mmap --no-warmup --no-repack -nr -ndio --no-direct-io", _LEFT_OUT),
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
        _OTHER_MODELS, _BEHIND._replace(hint="moepack run {model} -- llama-server -m {{}} {option}")
    ),
    **_rows(
        "-b --batch-size",
        Spelling(note="a prompt is computed in micro-batches (-ub): {option} has no effect here"),
    ),
    **_rows(
        "-np --parallel",
        Spelling(
            problem="`run` computes one text at a time", hint="moepack serve {model} -- {option}"
        ),
    ),
    **_rows(
        "--port --host --api-key",
        Spelling(problem="`run` is not a server", hint="moepack serve {model} {option}"),
    ),
}
SERVE: dict[str, Spelling] = {
    **_BOTH,
    **_rows(_SERVED, Spelling()),
    **_rows(_SERVED_FLAGS, Spelling(0)),
    **_rows("-a --alias", Spelling(name="--name")),
    **_rows(_OTHER_MODELS, _BEHIND._replace(hint="moepack serve {model} -- {option}")),
}
_SWITCHES = {"on", "enabled", "true", "1", "off", "disabled", "false", "0", "auto", "-1"}
_BEFORE = {name: name for name in ("--host", "--port", "--api-key", *_MODEL_OPTIONS)}
_BEFORE |= {"-a": "--name", "--alias": "--name"}
"""Options of llama-server that stand before the dashes, and their names there."""
_EITHER_SIDE = {"-c": "--context", "--ctx-size": "--context", "-t": "--threads"}
_EITHER_SIDE["--threads"] = "--threads"


def check_rest(
    models: Sequence[str], words: Sequence[str], ours: Mapping[str, int | None] = {}
) -> None:
    """Raise RequestError for options behind `--` that `serve` has itself, or cannot have there.

    `ours` are values before `--` of options that may stand on either side, by their names here.
    """
    for index, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name in _BEFORE:
            count = 1 if sign else 2
            value = value if sign else "".join(words[index + 1 : index + 2])
            rest = [*words[:index], *words[index + count :]]
            before = [value] if name in _MODEL_OPTIONS else [*models, _BEFORE[name], value]
            line = command_line("serve", [*before, *(["--", *rest] if rest else [])])
            raise RequestError(f"{name} goes before --, not after it", hint=line)
        if ours.get(_EITHER_SIDE.get(name, "")) is not None:
            raise RequestError(f"{name} is given before and after --", hint="name it once")
        if SERVE.get(name) is _HUB:
            raise RequestError(f"{name}: {_HUB.problem}", hint=_HUB.hint.format(command="serve"))


class Translation:
    """Words for moepack, words for llama.cpp's server, and answers to the rest.

    `model` is the one behind `-m`, and the first of the words. `answers` are errors, by the model.
    Raises RequestError.
    """

    def __init__(
        self, command: click.Command, words: Sequence[str], spellings: Mapping[str, Spelling]
    ) -> None:
        self.words: list[str] = []
        self.passed_on: list[str] = []
        self.answers: list[Callable[[str], RequestError]] = []
        self.model: str | None = None
        self._command, self._left = command, list(words)
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        self._place = len(arguments) - 1  # the model is the last argument, before a prompt
        own = {
            name: 0 if option.is_flag or option.count else option.nargs
            for option in command.params
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        while self._left:
            word = self._left.pop(0)
            name, sign, value = word.partition("=") if word.startswith("-") else (word, "", "")
            if name in _MODEL_OPTIONS or name in _HUB_OPTIONS:
                self._set_model(name, [value] if sign else self._values(1))
            elif name in spellings and name not in own:
                self._add_option(name, spellings[name], value if sign else None)
            else:
                self.words += [word, *self._values(0 if sign else own.get(name, 0))]

    def _values(self, count: int) -> list[str]:
        values, self._left = self._left[:count], self._left[count:]
        return values

    def _set_model(self, name: str, values: Sequence[str]) -> None:
        if not values:
            raise RequestError(f"{name} names no model", hint=f"{name} FILE")
        self.model = values[0]
        if name in _HUB_OPTIONS:
            self.model = hub_address(f"hf:{values[0]}") or values[0]
        self.words.insert(self._place, self.model)

    def _add_option(self, name: str, spelling: Spelling, value: str | None) -> None:
        if value is not None and not spelling.values and spelling.problem is None:
            raise RequestError(f"{name} takes no value", found=value, hint=f"{name} alone")
        is_bare = spelling.has_switch and not _SWITCHES.issuperset(self._left[:1])
        values = [value] if value is not None else [] if is_bare else self._values(spelling.values)
        if spelling.has_switch:
            values = values or ["on"]
        option = shlex.join([name, *values])
        if spelling is _GPU and values == ["0"]:
            return
        if spelling.problem is not None:
            self.answers.append(lambda model: _answer(self._command, spelling, option, model))
        elif spelling.note is not None:
            complain("note", spelling.note.format(option=option))
        elif spelling.name is not None:
            self.words += [spelling.name, *values]
        elif not spelling.is_left_out:
            self.passed_on += [name, *values]


def _answer(command: click.Command, spelling: Spelling, option: str, model: str) -> RequestError:
    name = option.partition(" ")[0]
    hint = spelling.hint.format(model=model, option=option, command=command.name)
    return RequestError(f"{name}: {spelling.problem}", hint=hint)


class LlamaCommand(click.Command):
    """A command that takes options of llama.cpp, and may end with `--` and words for a program.

    These words are its argument `rest`, None without `--`; `rest_metavar` stands for them in the
    usage line. Options for llama.cpp's server are its argument `passed_on`.
    """

    def __init__(
        self, *arguments: Any, spellings: Mapping[str, Spelling], rest_metavar: str, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._spellings, self._rest_metavar = spellings, rest_metavar

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words before `--`. Raises RequestError for options that are answered."""
        end = args.index("--") if "--" in args else len(args)
        rest = tuple(args[end + 1 :]) if "--" in args else None
        if context.resilient_parsing:
            return super().parse_args(context, args[:end])
        if rest is None:
            _refuse_program(args)
        translation = Translation(self, args[:end], self._spellings)
        check_repeated(self, translation.words)
        try:
            left = super().parse_args(context, translation.words)
        except click.MissingParameter:
            if translation.answers:
                raise translation.answers[0]("MODEL") from None
            raise
        model, *others = context.params["source_or_pack"]
        if translation.answers:
            raise translation.answers[0](shell_word(model))
        if translation.model is not None and any(not is_prompt(other) for other in others):
            problem = f"the model is named twice: {others[0]}, and -m {translation.model}"
            raise RequestError(problem, hint="name it once")
        context.params.update(rest=rest, passed_on=translation.passed_on)
        return left

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        """Return the pieces of the usage line."""
        return [*super().collect_usage_pieces(context), f"[-- {self._rest_metavar}]"]


def _refuse_program(words: Sequence[str]) -> None:
    """Raise RequestError for a program of llama.cpp without `--` before it."""
    names = [
        "" if before == _SERVER_OPTION else os.path.basename(word)
        for before, word in zip(["", *words], words, strict=False)
    ]
    index = next((n for n, name in enumerate(names) if name in _PROGRAMS), None)
    if index is None:
        return
    before, program = list(words[:index]), list(words[index:])
    option = next((n for n, word in enumerate(program[:-1]) if word in _MODEL_OPTIONS), None)
    if not before and option is not None:
        before = [program[option + 1]]
        program[option + 1] = "{}"
    line = command_line("run", [*(before or ["MODEL.gguf"]), "--", *program])
    raise RequestError(f"a program comes after --: {words[index]}", hint=line)


def is_prompt(text: str) -> bool:
    """Return whether a text has a space and is no path: neither it nor its folder exists."""
    folder = os.path.dirname(os.path.expanduser(text))
    is_path = os.path.lexists(text) or (folder not in ("", "/") and os.path.isdir(folder))
    return " " in text.strip() and not is_path


def split_fields(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return options without those that llama.cpp's server heeds only as fields of requests.

    These come as such fields. Raises RequestError for values that llama.cpp would refuse.
    """
    left: list[str] = []
    fields: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word not in (*_SCHEMAS, *_SCHEMA_FILES, *_BIASES):
            left.append(word)
            continue
        value = next(rest, None)
        if value is None:
            raise RequestError(f"{word} has no value")
        if word in _BIASES:
            fields.setdefault("logit_bias", []).append(_read_bias(word, value))
        else:
            fields["json_schema"] = _read_schema(word, value)
    return left, fields


def _read_schema(option: str, text: str) -> dict[str, Any]:
    if option in _SCHEMA_FILES:
        path = text
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or "not text"
            raise RequestError(f"{option}: {problem}", path=path) from None
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{option}: not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise RequestError(f"{option}: not a JSON schema", expected='{"type": …}', found=text)
    return schema


def _read_bias(option: str, text: str) -> list[float | bool]:
    match = _BIAS.fullmatch(text)
    if match is None:
        raise RequestError(f"{option}: not a token's bias", expected="15043+1", found=text)
    # The server takes `false` for a token that never comes.
    return [int(match[1]), False if match[2] == "-inf" else float(match[2])]
