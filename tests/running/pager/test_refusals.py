"""Models and options that a pager cannot serve are refused before a program starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import MoepackError, PackError, RequestError, SourceError
from moepack.packing.opening import open_model
from moepack.running.pager.pager import Pager, PagerOptions
from tests.support.models import FIXTURES, first_shard, pack_model
from tests.support.odd_models import legacy


def open_pager(path: Path, **options: Any) -> Pager:
    with open_model([path]) as pack:
        return Pager(pack, PagerOptions(**options), lambda error: None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"policy": "clock"}, "no such policy"),
        ({"check": "sometimes"}, "no such check"),
        ({"backend": "carrier pigeon"}, "no such backend"),
    ],
)
def test_what_is_no_option_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        open_pager(first_shard("qwen3moe"), **wrong)


def experts_alone(folder: Path) -> Path:
    pack_model([first_shard("qwen3moe")], folder / "pack", experts_only=True)
    return folder / "pack"


def experts_apart(folder: Path) -> Path:
    pack_model([legacy().write(folder / "m.gguf")], folder / "pack")
    return folder / "pack"


def without_dense_file(folder: Path) -> Path:
    pack_model([first_shard("qwen3moe")], folder / "pack")
    (folder / "pack" / "dense.bin").unlink()
    return folder / "pack"


def dense_model(_: Path) -> Path:
    return FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (experts_alone, PackError, "not a whole pack"),
        (experts_apart, PackError, "a tensor of its own"),
        (without_dense_file, PackError, "dense.bin: the file is missing"),
        (dense_model, SourceError, "no .*expert"),
    ],
)
def test_what_no_program_can_run_is_refused(
    model: Callable[[Path], Path], error: type[MoepackError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        open_pager(model(tmp_path), memory="floor")
