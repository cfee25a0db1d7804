"""Hostile records of finished files: cut off, changed by somebody, or of another pack."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import moepack
from moepack.common.errors import MachineError, RequestError
from moepack.common.fields import parse_strictly
from moepack.pack.format import manifest
from moepack.packing.pack_model import SharedPack
from moepack.packing.plan.pack_summary import PackSummary
from moepack.packing.writing import commit, records
from tests.support.gguf_builder import F32, moe
from tests.support.hostile_input import QUICK, Edit, assert_cheap, edits, mutate
from tests.support.models import contents

FILES = ("experts-00000.bin", "experts-00001.bin", "dense.bin")
RECORDS = ("input.json", *(f"{name}.json" for name in FILES))


class Interrupted:
    """A pack whose files are finished, of one process or of several; `path` is a copy of it."""

    def __init__(self, folder: Path, is_shared: bool) -> None:
        model = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(folder / "m.gguf")
        self.path = folder / "pack"
        self._before = folder / "before"
        self._model = model
        self._shared = SharedPack([model], self.path) if is_shared else None
        moepack.pack_model([model], folder / "whole")
        self.packed = contents(folder / "whole")
        if self._shared is not None:
            self._shared.write_part("1/1")
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(commit, "write_synced", _fail)
                with pytest.raises(MachineError):
                    moepack.pack_model([model], self.path)
        self.path.rename(self._before)

    def record(self, name: str) -> bytes:
        return (self._before / "pack.records" / name).read_bytes()

    def resume(self, name: str, data: bytes) -> PackSummary:
        """Go on with another record; the pack that comes of it is the one that was planned."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self._before, self.path)
        (self.path / "pack.records" / name).write_bytes(data)
        if self._shared is None:
            summary = moepack.pack_model([self._model], self.path, resume=True)
        else:
            summary = self._shared.write_part("1/1")
            self._shared.commit()
        assert contents(self.path) == self.packed
        return summary


def _fail(path: Path, data: bytes) -> None:
    raise OSError(28, "no space left on device")


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "shared"])
def interrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Interrupted:
    return Interrupted(tmp_path_factory.mktemp("interrupted"), request.param)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_with_any_byte_changed_or_cut_off_only_costs_its_file(
    name: str, interrupted: Interrupted
) -> None:
    whole = interrupted.record(name)
    assert records.unseal(whole)
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    damaged += [whole[:at] for at in range(len(whole))]
    damaged += [b"null", b"[" * 100_000, b"\xff\xfe\n"]
    assert not any(map(records.unseal, damaged))
    for data in (damaged[0], b""):
        kept_count = len(FILES) - (name != "input.json")
        assert interrupted.resume(name, data).resumed_file_count == kept_count


@pytest.mark.parametrize(
    "change",
    [
        {"digests": ""},
        {"digests": "00" * 8},
        {"digests": "zz" * 48},
        {"digests": 5},
        {"digests": None},
        {"name": "../../x"},
        {"name": FILES[1]},
        {"name": 10**400},
        {"input": "xxh3:0000000000000000"},
    ],
)
def test_a_record_that_makes_no_sense_is_not_trusted(
    change: dict[str, Any], interrupted: Interrupted
) -> None:
    """It is well formed, since `seal` writes it, but is another file's, or nothing's."""
    record: dict[str, Any] = parse_strictly(interrupted.record(RECORDS[1]))
    del record["manifest_digest"]
    summary = interrupted.resume(RECORDS[1], manifest.seal(record | change))
    assert summary.resumed_file_count == len(FILES) - 1


def test_a_pack_of_other_input_is_left_alone(interrupted: Interrupted) -> None:
    begun: dict[str, Any] = parse_strictly(interrupted.record("input.json"))
    del begun["manifest_digest"]
    changes: list[dict[str, Any]] = [{"order": ""}, {"source": []}, {"tool": "moepack 0"}]
    for change in changes:
        with pytest.raises(RequestError, match=f"not the same {next(iter(change))}"):
            interrupted.resume("input.json", manifest.seal(begun | change))


def test_a_record_of_gigabytes_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for start in (b"", b"[" * 1000):
        path.write_bytes(start)
        os.truncate(path, 4 << 30)
        call = ("from moepack.packing.writing import records, target", _READ)
        assert_cheap(call, path)


_READ = """
import os
from pathlib import Path
from moepack.common.errors import MoepackError
folder = target.SharedFolder(Path(path).parent)
assert not records.unseal(folder.read("record.json", records.MAX_LENGTH))
raise MoepackError("damaged", path=path)
"""


@settings(QUICK, max_examples=5)
@given(edits(1000))
def test_whatever_a_record_says_the_pack_is_the_one_that_was_planned(
    interrupted: Interrupted, damage: list[Edit]
) -> None:
    interrupted.resume(RECORDS[1], mutate(interrupted.record(RECORDS[1]), damage))
