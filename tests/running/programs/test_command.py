"""A program's command: the model's path, the library, and llama.cpp's own variables."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moepack.running.programs.command import (
    experts_used,
    fill_in,
    find_misled_program,
    find_reading_option,
    llama_variables,
    micro_batch,
    waiting_variables,
)
from moepack.running.programs.runner import program_environment

MAP, KEEP = {"LLAMA_ARG_LOAD_MODE": "mmap"}, {"LLAMA_ARG_REPACK": "off"}


@pytest.mark.parametrize(
    ("argument", "filled_in"),
    [
        ("{}", "/a b/m.gguf"),
        ("--model={}", "/a b/m.gguf"),
        ("MODEL={}", "/a b/m.gguf"),
        ("{{}}", "{}"),
        ("--json-schema={{}}", "{}"),
        ('{"a": {}}', None),
        ("{{}", None),
    ],
)
def test_the_path_is_filled_in_where_nothing_else_can_be_meant(
    argument: str, filled_in: str | None
) -> None:
    front = argument[: argument.find("=") + 1] if filled_in else ""
    expected = argument if filled_in is None else front + filled_in
    assert fill_in(["x", argument], "/a b/m.gguf") == ["x", expected]


@pytest.mark.parametrize(
    ("theirs", "both"), [("/theirs.so", "/ours.so:/theirs.so"), ("", "/ours.so")]
)
def test_libraries_that_are_preloaded_already_stay_behind_ours(
    theirs: str, both: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"LD_PRELOAD": theirs, "HOME": "/"})
    supervisor: Any = SimpleNamespace(environment={"MOEPACK_MODEL": "m"})
    environment = program_environment(supervisor, Path("/ours.so"), {"A": "b"})
    expected = {"LD_PRELOAD": both, "HOME": "/", "MOEPACK_MODEL": "m", "A": "b"}
    assert environment == expected | waiting_variables()


@pytest.mark.parametrize(
    ("command", "names", "variables"),
    [
        ("llama-server -m {}", {}, MAP | KEEP),
        ("llama-server -m {} --load-mode auto", {}, KEEP),
        ("llama-server -m {} --no-mmap", {}, KEEP),
        ("llama-server -m {} --repack", {}, MAP),
        ("llama-server -m {}", {"LLAMA_ARG_NO_MMAP": ""}, KEEP),
        ("llama-server -m {}", {"LLAMA_ARG_NO_REPACK": "1", "LLAMA_ARG_LOAD_MODE": "dio"}, {}),
    ],
)
def test_what_the_user_said_stays(
    command: str, names: dict[str, str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", names)
    assert llama_variables(command.split()) == variables
    assert llama_variables(["sh", "-c", command]) == variables


@pytest.mark.parametrize(
    ("command", "names", "option"),
    [
        ("llama-server -m {}", {}, None),
        ("llama-server --load-mode dio", {}, "--load-mode dio"),
        ("llama-server -lm mmap+mlock", {}, "-lm mmap+mlock"),
        ("llama-server -lm", {}, None),
        ("llama-server --no-mmap", {}, "--no-mmap"),
        ("llama-cli --prompt=--mlock --no-mmap", {}, "--no-mmap"),
        ("llama-server", {"LLAMA_ARG_LOAD_MODE": "none"}, "LLAMA_ARG_LOAD_MODE=none"),
        ("llama-server -lm auto", {"LLAMA_ARG_LOAD_MODE": "none"}, None),
        ("llama-server", {"LLAMA_ARG_NO_MMAP": ""}, "LLAMA_ARG_NO_MMAP="),
        ("llama-server", {"LLAMA_ARG_MMAP": "off"}, "LLAMA_ARG_MMAP=off"),
        ("llama-server", {"LLAMA_ARG_MMAP": "on", "LLAMA_ARG_MLOCK": "0"}, None),
        ("llama-server", {"LLAMA_ARG_MLOCK": "1"}, "LLAMA_ARG_MLOCK=1"),
    ],
)
def test_the_option_by_which_a_model_is_read_whole_is_named(
    command: str, names: dict[str, str], option: str | None
) -> None:
    assert find_reading_option(command.split(), names) == option
    assert find_reading_option(["sh", "-c", command], names) == option


@pytest.mark.parametrize(
    "command",
    [
        ["llama-cli", "-m", "{}", "-p", "use --mlock, try -ub 1; is --no-repack slow?"],
        ["llama-cli", "-m", "{}", "-p", "--mlock"],
        ["llama-cli", "-m", "{}", "--system-prompt", "--no-repack", "--grammar", "-ub"],
        ["llama-cli", "-m", "{}", "--new-option-with-text", "see --mlock -ub 1 --no-repack"],
        ["python", "-c", "llama('--mlock -ub 1 --no-repack')"],
        ["python", "-c", "f() --mlock -ub 1 --no-repack"],
        ["sh", "-c", "llama-cli -m $MOEPACK_MODEL -p 'use --mlock -ub 1 --no-repack'"],
        ["sh", "-c", "echo open 'quotation"],
    ],
)
def test_words_of_a_text_are_no_options(command: list[str]) -> None:
    assert find_reading_option(command, {}) is None
    assert llama_variables(command) == MAP | KEEP
    assert micro_batch(command) == 512


@pytest.mark.parametrize(
    "front",
    [
        ["sh", "-c"],
        ["/bin/bash", "-lc"],
        ["bash", "-euo", "pipefail", "-c"],
        ["env", "A=1", "timeout", "9", "zsh", "-i", "-c"],
        ["busybox", "ash", "-ec"],
    ],
)
def test_the_words_of_a_command_for_a_shell_are(front: list[str]) -> None:
    text = "cd /models && exec llama-server -m {} -ub 8;llama-cli --load_mode=none|sort"
    for command in ([*front, text], [*front, f'dash -c "{text}"']):
        assert find_reading_option(command, {}) == "--load-mode none"
        assert micro_batch(command) == 8
        assert llama_variables(command) == KEEP


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--override-kv qwen3moe.expert_used_count=int:3", 3),
        ("--override-kv a=bool:true,qwen3moe.expert_used_count=int:12,b=int:4 -c 8", 12),
        ("--override-kv qwen3moe.expert_used_count=int:3 --override-kv a=int:4", 3),
        ("--override-kv=qwen3moe.expert_used_count=int:3", 3),
        (
            "--override-kv qwen3moe.expert_used_count=int:3,qwen3moe.expert_used_count=int:4 "
            "--override-kv qwen3moe.expert_used_count=int:5",
            3,
        ),
        ("--override-kv qwen2moe.expert_used_count=int:3", None),
        ("--override-kv qwen3moe.expert_count=int:3", None),
        ("-p --override-kv qwen3moe.expert_used_count=int:3", None),
    ],
)
def test_another_number_of_experts_is_read_from_the_command(words: str, count: int | None) -> None:
    command = ["llama-server", *words.split()]
    assert experts_used(command, "qwen3moe") == count
    assert experts_used(["sh", "-c", " ".join(command)], "qwen3moe") == count


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a model, a program of llama.cpp, and a script with such a name."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "link.gguf").symlink_to("m.gguf")
    shutil.copy("/bin/true", tmp_path / "llama-server")
    (tmp_path / "llama-mine").write_text('#!/bin/sh\nexec llama-server -m "$MOEPACK_MODEL" "$@"\n')
    (tmp_path / "llama-mine").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "is_misled"),
    [
        (["llama-server", "--port", "8080"], True),
        (["./llama-server", "-m", "other.gguf"], True),
        (["nice", "llama-server"], True),
        (["sh", "-c", "cd /tmp; exec llama-server -m model.gguf"], True),
        (["llama-server", "-m", "{}"], False),
        (["llama-server", "--model={}"], False),
        (["llama-server", "-m", "m.gguf"], False),
        (["llama-server", "-m", "link.gguf"], False),
        (["env", "LLAMA_ARG_MODEL=m.gguf", "llama-server"], False),
        (["sh", "-c", 'llama-server -m "$MOEPACK_MODEL"'], False),
        (["sh", "-c", 'llama-server -m "$1"', "sh", "{}"], False),
        (["llama-server", "-hf", "owner/name"], False),
        (["llama-server", "--version"], False),
        (["llama-mine", "--port", "8080"], False),
        (["python", "serve.py", "--name", "llama-large"], False),
        (["./serve.sh"], False),
    ],
)
def test_a_program_of_llama_cpp_without_the_path_is_found(
    command: list[str], is_misled: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = find_misled_program(command, [folder / "m.gguf"])
    assert (program is not None) == is_misled
    if is_misled:
        monkeypatch.setenv("LLAMA_ARG_MODEL", "m.gguf")
        assert find_misled_program(command, [folder / "m.gguf"]) is None
