"""The command `pull`, and what others say of a part of a pack."""

import re
from pathlib import Path

import pytest

import moepack
from tests.support.models import flip
from tests.support.pulls import is_same
from tests.support.warm_command import Run

pytestmark = pytest.mark.long


def test_a_part_says_what_is_here_and_what_is_missing(
    address: str, tmp_path: Path, cli: Run
) -> None:
    part = tmp_path / "part"
    pull = cli("pull", address, "-o", part, "--layers", "1")
    assert pull.returncode == 0, pull.stderr
    assert pull.stdout.splitlines() == [
        f"{part}: 1.0 MiB of 1.6 MiB from {address}",
        f"{part}: 16 of 32 experts and the dense part, 1.1 MiB pulled; every part had its digest",
        f"  16 experts are missing, all of layer 0 among them, and read from {address}",
        f"next: moepack run {part}",
    ]
    assert "MiB; 16 experts are missing, all of layer 0 among them" in cli("inspect", part).stdout
    listed = cli("list", part, "--csv").stdout
    assert listed.count(f"{address}/experts-00000.bin,") == 16
    assert listed.count(f"{part}/experts-00001.bin,") == 16
    where = cli("locate", part, "--layer", "0", "--expert", "3").stdout
    assert where.startswith(f"{address}/experts-00000.bin\n")


def test_the_exit_code_of_a_verification_is_that_of_what_is_here(
    address: str, tmp_path: Path, cli: Run
) -> None:
    part = tmp_path / "part"
    cli("pull", address, "-o", part, "--layers", "1", "-q")
    sound = cli("verify", part)
    assert sound.returncode == 0
    assert "no fault in the checked parts. 16 of 32 blobs" in sound.stdout
    assert "not looked at: 16 of 32 blobs" in sound.stdout
    with moepack.Pack(part) as pack:
        where = pack.locate(1, 4)
    flip(where.path, where.offset + 9)
    assert cli("verify", part).returncode == 5
    mended = cli("pull", "-o", part, "--resume")
    assert mended.returncode == 0, mended.stderr
    assert cli("verify", part).returncode == 0


def test_the_whole_pack_is_printed_as_such(address: str, tmp_path: Path, cli: Run) -> None:
    quiet = cli("pull", address, "-o", tmp_path / "a", "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert is_same(tmp_path / "a", tmp_path / "store" / "a.moepack")
    again = cli("pull", address, "-o", tmp_path / "a")
    unread = "the whole pack, 0 B pulled, 1.6 MiB there already; no part was read\n"
    assert unread in again.stdout
    flip(tmp_path / "a" / "experts-00000.bin", 0)
    repaired = cli("repair", tmp_path / "a", "--from", address)
    assert re.fullmatch(
        rf"{tmp_path}/a: 1 damaged range, [\d.]+ KiB written from {address};"
        r" 1.3 MiB compared, every part had its digest\n  layer 0 .*\nnext: moepack run .*\n",
        repaired.stdout,
    )
    again = cli("repair", tmp_path / "a").stdout
    assert "a: nothing was damaged; 1.3 MiB compared, every part had its digest\n" in again
    flip(tmp_path / "a" / "experts-00000.bin", 0)
    refused = cli("repair", tmp_path / "a")
    assert refused.returncode == 4
    assert "as the --from\n" in refused.stderr
