"""Who else uses the drive and the CPUs while reads are timed."""

import os
import subprocess
from pathlib import Path

import pytest

from moepack.bench import disturbance
from moepack.bench.disturbance import DisturbanceMonitor
from moepack.storage.backend import ReadRequest
from moepack.storage.buffers import map_memory
from moepack.storage.threaded import ThreadedBackend


def test_reads_of_another_process_are_seen_and_our_own_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disturbance, "_waited", lambda: None)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(32 << 20))
    os.sync()
    others = DisturbanceMonitor([path])
    backend = ThreadedBackend(direct=True)
    request = ReadRequest(path, 0, map_memory(32 << 20))
    shares = []
    for _ in range(20):  # somebody else may read as well
        if backend.read(request).error is not None:
            pytest.skip("no direct reads here")
        shares.append(others())
    backend.close()
    if disturbance._work_of(disturbance.drive_of(path) or path) == (None, None):
        pytest.skip("this system does not tell what drives do")
    alone = min(shares)
    command = f"for n in $(seq 20); do dd if={path} of=/dev/null bs=1M iflag=direct; done"
    with subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.read()
        theirs = others()  # before it is waited for: then it counts as one of us
    assert theirs > alone + 0.1


def test_what_others_read_disturbs_as_long_as_the_drive_works_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that rests nine tenths of the time is not disturbed by who reads as much as we."""
    work = [(0, 0.0)]
    ours, now = [0], [0.0]
    monkeypatch.setattr(disturbance, "drive_of", lambda path: path)
    monkeypatch.setattr(disturbance, "_work_of", lambda drive: work[0])
    monkeypatch.setattr(disturbance, "_own_length", lambda: ours[0])
    monkeypatch.setattr(disturbance, "_waited", lambda: None)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    others = DisturbanceMonitor([tmp_path])
    for busy, length, own, share in (
        (1.0, 1000, 1000, 0.0),
        (1.0, 1000, 250, 0.75),
        (0.1, 1000, 500, 0.05),
        (1.5, 1000, 500, 0.5),  # what the system counts is not exact
        (0.0, 0, 0, 0.0),
    ):
        now[0] += 1
        work[0] = (work[0][0] + length, work[0][1] + busy)
        ours[0] += own
        assert others() == pytest.approx(share)
