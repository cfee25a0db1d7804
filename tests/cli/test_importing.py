"""The command `import`: what it prints, and with which codes it ends."""

import json
from pathlib import Path

import pytest

import moepack
from moepack.cli import main
from tests.support.models import first_shard, flip


def test_the_pack_is_made_and_differences_have_a_code_of_their_own(
    packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts, pack = tmp_path / "experts", tmp_path / "pack"
    moepack.export("moe-stream-dir", packs["mixtral"], experts)
    words = ["import", "moe-stream-dir", str(experts), "--source", str(first_shard("mixtral"))]
    assert main.run([*words, "-o", str(pack)]) == 0
    made, compared, then = capsys.readouterr().out.splitlines()
    assert made.startswith(f"{pack}: 3 files, ")
    assert compared.startswith(f"{experts}: sound. 16 blobs, 48 parts, ")
    assert then == f"next: moepack run {pack}"
    flip(experts / "layer_01.down.bin", 77)
    assert main.run([*words, "-o", str(tmp_path / "second"), "-q"]) == 5
    out = capsys.readouterr().out
    assert "layer 1 expert 0 ffn_down_exps.weight in layer_01.down.bin at byte 77: " in out
    assert out.endswith(f"\n  {tmp_path / 'second'} has the bytes of the GGUF, and stays\n")
    assert main.run([*words, "-o", str(tmp_path / "third"), "--json"]) == 5
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == {"engine", "path", "source", "pack", "report"}
    assert printed["report"]["findings"][0]["offset"] == 77
    assert main.run([*words[:3], "-o", str(tmp_path / "fourth")]) == 2
    assert "hint: name the one it was made of with --source\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("server.log", "-o", "t.moetrace"), "moepack trace import server.log -o t.moetrace"),
        (("vllm", "experts", "-o", "pack"), "moepack import --help"),
        (("sglang",), "moepack import sglang experts --source model.gguf -o model.moepack"),
    ],
)
def test_what_is_no_format_is_answered(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["import", *words]) == 2
    assert f"hint: {hint}\n" in capsys.readouterr().err
