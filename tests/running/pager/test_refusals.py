"""Models and options that a pager cannot serve are refused before a program starts."""

from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import PackError, RequestError, SourceError
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


def test_what_no_program_can_run_is_refused(tmp_path: Path) -> None:
    alone, apart, broken = (tmp_path / name for name in ("alone", "apart", "broken"))
    pack_model([first_shard("qwen3moe")], alone, experts_only=True)
    pack_model([legacy().write(tmp_path / "m.gguf")], apart)
    pack_model([first_shard("qwen3moe")], broken)
    (broken / "dense.bin").unlink()
    dense = FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"
    for model, error, words in (
        (alone, PackError, "not a whole pack"),
        (apart, PackError, "a tensor of its own"),
        (broken, PackError, "dense.bin: the file is missing"),
        (dense, SourceError, "no .*expert"),
    ):
        with pytest.raises(error, match=words):
            open_pager(model, memory="floor")
