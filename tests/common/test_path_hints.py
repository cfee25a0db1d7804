"""What is said of a path where nothing is."""

from pathlib import Path

import pytest

from moepack.common.path_hints import hub_address, missing_hint, missing_model_hint

HUB = "moepack run hf://unsloth/Qwen3-GGUF"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("hf:unsloth/Qwen3-GGUF", HUB),
        ("hf.co/unsloth/Qwen3-GGUF:Q8_0", f"{HUB}/Q8_0"),
        ("unsloth/Qwen3-GGUF", HUB),
        ("hf.co/unsloth/Qwen3-GGUF:latest", HUB),
        ("unsloth/Qwen3-GGUF:UD-Q2_K_XL", f"{HUB}/UD-Q2_K_XL"),
        ("https://huggingface.co/unsloth/Qwen3-GGUF/", HUB),
        ("https://huggingface.co/unsloth/Qwen3-GGUF/tree/main", HUB),
        (
            "https://huggingface.co/unsloth/Qwen3-GGUF/blob/main/Q4/a-00002-of-00003.gguf",
            f"{HUB}/Q4/a-00002-of-00003.gguf",
        ),
        ("https://hf.co/unsloth/Qwen3-GGUF/tree/v2/Q4?x=1", f"{HUB}@v2/Q4"),
        (
            "https://huggingface.co/unsloth/Qwen3-GGUF?show_file_info=Q4%2Fa-00001-of-00003.gguf",
            f"{HUB}/Q4/a-00001-of-00003.gguf",
        ),
        ("huggingface:unsloth/Qwen3-GGUF/Q4/a.gguf", f"{HUB}/Q4/a.gguf"),
    ],
)
def test_a_name_of_a_hub_says_how_to_get_it(name: str, command: str) -> None:
    assert missing_hint(name) == f"on the hub: {command}"


@pytest.mark.parametrize(
    "path",
    ["model.gguf", "models/model.gguf", "./owner/name", "../a/b", "/a/b", "a/b/c", "a/b.gguf"],
)
def test_a_path_is_no_name_of_a_hub(path: str) -> None:
    assert hub_address(path) is None


def test_what_lies_in_a_folder_that_is_here_is_no_name_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_address("models/qwen3") is not None
    (tmp_path / "models").mkdir()
    assert hub_address("models/qwen3") is None


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("", "the name is empty: is a shell variable unset?"),
        (" ", "the name is empty: is a shell variable unset?"),
        ("Model.gguf", "did you mean model.gguf?"),
        ("model.GGUF", "did you mean model.gguf?"),
    ],
)
def test_what_may_be_meant_is_named(
    path: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "unlike.csv").touch()
    monkeypatch.chdir(tmp_path)
    assert hint in (missing_hint(path) or "")


def test_a_model_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert missing_model_hint("other.gguf").startswith("from the hub: moepack run hf://")
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    hint = missing_model_hint("qwen")
    assert hint.startswith("here are a.gguf, b-00001-of-00002.gguf; ")
    assert "moepack run hf://" in hint
