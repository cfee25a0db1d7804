"""Hostile journals: cut off, or changed by somebody."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from moepack.common.errors import MachineError, MoepackError, RequestError
from moepack.pack.verifying.verifier import verify
from moepack.packing.writing import commit, journal, line_log
from moepack.version import TOOL
from tests.support.gguf_builder import F32, moe
from tests.support.hostile_input import (
    QUICK,
    Edit,
    assert_cheap,
    assert_clear,
    assert_tidy,
    edits,
    mutate,
)
from tests.support.models import pack_model


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Leave a pack that failed just before its index was written; read-only."""
    folder = tmp_path_factory.mktemp("interrupted")
    model = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(folder / "m.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "write_synced", _fail)
        with pytest.raises(MachineError):
            pack_model([model], folder / "pack")
    assert (folder / "pack" / "pack.journal").read_bytes().count(b"\n") == 4
    return folder


def _fail(path: Path, data: bytes) -> None:
    raise OSError(28, "no space left on device")


def resume(interrupted: Path, target: Path, data: bytes) -> bool:
    """Continue with a journal; return whether a pack came of it, which is then verified."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(interrupted / "pack", target)
    (target / "pack.journal").write_bytes(data)
    model = interrupted / "m.gguf"
    try:
        pack_model([model], target, resume=True)
    except MoepackError as error:
        assert_tidy(error)
        assert not (target / "manifest.json").exists()
        return False
    assert verify(target, [str(model)], threads=1).passed
    return True


def journal_of(interrupted: Path) -> bytes:
    return (interrupted / "pack" / "pack.journal").read_bytes()


def places(data: bytes) -> list[int]:
    """Return some places in a journal, with those around the ends of its lines."""
    ends = [at for at, byte in enumerate(data) if byte == 10]
    around = {end + more for end in ends for more in (-1, 0, 1)} & set(range(len(data)))
    return sorted(around | set(range(0, len(data), 29)))


def test_a_flipped_bit_in_a_journal_never_gives_a_wrong_pack(
    interrupted: Path, tmp_path: Path
) -> None:
    data = journal_of(interrupted)
    for at in places(data):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 7
        resume(interrupted, tmp_path / "pack", bytes(damaged))


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line | {"digests": ""},
        lambda line: line | {"digests": line["digests"] * 2},
        lambda line: line | {"digests": line["digests"][:-2]},
        lambda line: line | {"digests": "zz" * 48},
        lambda line: line | {"digests": 5},
        lambda line: {key: value for key, value in line.items() if key != "digests"},
        lambda line: line | {"name": "../../x"},
        lambda line: line | {"name": 10**4000},
    ],
)
def test_a_line_of_the_journal_that_makes_no_sense_is_not_trusted(
    change: Callable[[dict[str, Any]], Any], interrupted: Path, tmp_path: Path
) -> None:
    """The lines are well formed, since the journal writes them, but make no sense."""
    lines = journal_of(interrupted).decode().splitlines()
    first, second, *others = (json.JSONDecoder().raw_decode(line)[0] for line in lines)
    log = line_log.LineLog(tmp_path / "pack.journal")
    for line in (first, change(second), *others):
        log.append(line)
    log.close()
    resume(interrupted, tmp_path / "pack", (tmp_path / "pack.journal").read_bytes())


def test_a_journal_of_gigabytes_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pack.journal"
    for start in (b"", b"{}\n", b"[" * 1000):
        path.write_bytes(start)
        os.truncate(path, 4 << 30)
        call = ("from moepack.packing.writing import journal; from pathlib import Path", _RESUME)
        assert_cheap(call, path)


_RESUME = """
from moepack.common.errors import MoepackError
from moepack.version import TOOL
held = journal.Journal(Path(path))
held.resume({"a": 1})
raise MoepackError("begun anew", path=path)
"""


@settings(QUICK, max_examples=100)
@given(edits(1000))
def test_any_journal_is_taken_up_or_refused(
    tmp_path_factory: pytest.TempPathFactory, interrupted: Path, damage: list[Edit]
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.journal"
    path.write_bytes(mutate(journal_of(interrupted), damage))
    log = journal.Journal(path)
    try:
        log.resume({"tool": TOOL})
    except RequestError as error:
        assert_clear(error, path)
    finally:
        log.close()
