"""A packer that compresses is killed at any moment: there is no pack, and the next run goes on."""

import shutil
import signal
from pathlib import Path

import pytest

import moepack
from moepack.errors import PackError
from moepack.packing.pack_model import pack_model
from tests.support import machine_faults
from tests.support.compressible import compressible, write_model
from tests.support.models import contents

JOURNAL = "pack.journal"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of 3 MiB, which takes long enough to be disturbed."""
    builder = compressible((0, 1, 2, 3), experts=4, ne=(128, 128))
    return write_model(tmp_path_factory.mktemp("model") / "shards", builder).parent


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("packed") / "pack"
    pack_model(model, target, codec="zstd:19")
    return contents(target)


def test_it_leaves_no_pack_or_a_whole_one_and_resumes(
    model: Path, packed: dict[str, bytes], tmp_path: Path
) -> None:
    interrupted = 0
    for moment, count in enumerate((0, 2)):
        target = tmp_path / str(moment)
        arguments = ("-o", target, "--codec", "zstd:19", "--threads", str(1 + moment))
        process = machine_faults.start(model, *arguments)
        journal = target / JOURNAL
        machine_faults.wait_until(
            lambda journal=journal, count=count: (
                journal.exists()  # type: ignore[misc]
                and journal.read_bytes().count(b"\n") > count
            ),
            process,
        )
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        if (target / "manifest.json").exists():
            assert contents(target).items() >= packed.items()
            continue
        interrupted += 1
        with pytest.raises(PackError):
            moepack.open(target)
        target.mkdir(exist_ok=True)
        pack_model(model, target, codec="zstd:19", resume=True)
        assert contents(target) == packed
        shutil.rmtree(target)
    assert interrupted
