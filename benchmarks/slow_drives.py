"""Two drives of chosen speeds: file systems on loop devices, limited by a control group (Linux)."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

_ROOTS = (
    (Path("/sys/fs/cgroup"), "io.max", "{device} rbps={speed}"),
    (Path("/sys/fs/cgroup/blkio"), "blkio.throttle.read_bps_device", "{device} {speed}"),
)
"""Of both versions of control groups: where they are, the file with limits, and what it takes."""
_NEEDED = ("losetup", "mkfs.ext4", "mount", "umount")


class SlowDrives:
    """Mounted drives, and the group whose processes have to read them as slowly as is said."""

    def __init__(self, folders: Sequence[Path], devices: Sequence[str], group: Path) -> None:
        self.folders = tuple(folders)
        self._devices = devices
        self._group = group

    def limit(self, speeds: Sequence[int]) -> None:
        """Let each drive give so many bytes a second, to the processes of the group."""
        for device, speed in zip(self._devices, speeds, strict=True):
            numbers = os.stat(device).st_rdev
            place = f"{os.major(numbers)}:{os.minor(numbers)}"
            _limit(self._group, place, speed)

    @property
    def entry(self) -> Path:
        """The file that a process writes its number to, to belong to the group."""
        return self._group / "cgroup.procs"


@contextlib.contextmanager
def slow_drives(folder: Path, count: int, length: int) -> Iterator[SlowDrives | str]:
    """Make drives of `length` bytes; give the reason where that cannot be done here."""
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        yield f"{missing[0]} is not installed"
        return
    with ExitStack() as stack:
        try:
            group = _make_group(stack)
            folders, devices = [], []
            for number in range(count):
                mounted, device = _mount(folder / f"drive-{number}", length, stack)
                folders.append(mounted)
                devices.append(device)
            drives = SlowDrives(folders, devices, group)
            drives.limit([1 << 40] * count)
        except (OSError, subprocess.CalledProcessError) as error:
            yield f"cannot be tried here: {error}"
            return
        yield drives


def _make_group(stack: ExitStack) -> Path:
    for root, limits, _ in _ROOTS:
        group = root / f"moepack-bench-{os.getpid()}"
        if not root.is_dir():
            continue
        group.mkdir()
        if (group / limits).exists():
            stack.callback(group.rmdir)
            return group
        group.rmdir()
    raise OSError("no control group limits drives")


def _limit(group: Path, device: str, speed: int) -> None:
    for _, limits, line in _ROOTS:
        if (group / limits).exists():
            with open(group / limits, "r+") as file:
                file.write(line.format(device=device, speed=speed))


def _mount(folder: Path, length: int, stack: ExitStack) -> tuple[Path, str]:
    image = folder.with_suffix(".image")
    with open(image, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, length)
    stack.callback(image.unlink)
    _run("mkfs.ext4", "-q", "-F", image)
    command = ("losetup", "--find", "--show", "--direct-io=on", image)
    device = _run(*command).strip()
    stack.callback(_run, "losetup", "--detach", device)
    folder.mkdir()
    _run("mount", device, folder)
    stack.callback(_run, "umount", folder)
    return folder, device


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout
