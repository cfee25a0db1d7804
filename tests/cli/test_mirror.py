"""`moepack mirror`, and mirrors in other commands."""

import json
import shutil
from pathlib import Path

import pytest

from moepack.cli import main
from moepack.common.errors import MirrorWarning
from tests.support.models import flip
from tests.support.warm_command import Run


def test_a_mirror_is_made_described_and_removed(pack_copy: Path, tmp_path: Path, cli: Run) -> None:
    run = cli("mirror", pack_copy, tmp_path, "--hottest", "300KiB")
    folder = tmp_path / "pack.mirror"
    assert run.returncode == 0
    assert (
        f"{folder}: 8 experts, 288.0 KiB of 1.2 MiB; read back: every part had its digest"
        in run.stdout
    )
    assert "on the same drive as the pack: nothing is gained" in run.stdout
    shown = f"{folder}: 288.0 KiB of 1.7 MiB, the hottest 300.0 KiB"
    assert f"  mirror     {shown}\n" in cli("inspect", pack_copy).stdout
    every = json.loads(cli("mirror", pack_copy, tmp_path, "--json").stdout)
    assert (every["expert_count"], every["kept_length"]) == (32, 288 << 10)
    assert "1.2 MiB of its mirror read" in cli("verify", pack_copy).stdout
    run = cli("mirror", pack_copy, "--remove")
    assert (run.returncode, run.stdout) == (0, f"{folder}: removed\n")
    assert not folder.exists()
    assert cli("mirror", pack_copy, "--remove").returncode == 2


def test_what_is_wrong_with_a_mirror_is_said(pack_copy: Path, tmp_path: Path, cli: Run) -> None:
    assert cli("mirror", pack_copy, tmp_path, "-q").stdout == ""
    folder = tmp_path / "pack.mirror"
    flip(folder / "experts-00000.bin", 9)
    run = cli("verify", pack_copy)
    assert run.returncode == 5
    assert run.stdout.startswith("the mirror is damaged, the pack itself is not")
    assert "in the mirror its digest is" in run.stdout
    shutil.rmtree(folder)
    assert f"{folder}: not read: not there" in cli("inspect", pack_copy).stdout
    run = cli("verify", pack_copy)
    assert run.returncode == 0
    assert "not looked at: its mirror" in run.stdout
    run = cli("mirror", pack_copy, "--remove")
    assert f"whatever was in {folder} is left there" in run.stdout


def test_a_warning_is_a_note_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    main._warn(MirrorWarning("it is\ngone"), MirrorWarning, "a.py", 7)
    assert capsys.readouterr().err == "note: it is\\ngone\n"
