"""What must hold before a release. Each check yields its faults, and changes nothing.

A fault names the file, and the expected and the actual state.
"""

import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

from conformance import DIGESTS
from docs import command_pages
from moepack.running.programs.compiling import MACHINES, SOURCES
from tests.support.models import digest_of_all

ROOT = Path(__file__).parent.parent
_PLACES = {
    "include/moepack.h": r'^#define MOEPACK_VERSION "(.+)"$',
    "include/cmake/moepack-config-version.cmake": r"^set\(PACKAGE_VERSION (.+)\)$",
    "include/pkgconfig/moepack.pc": r"^Version: (.+)$",
    "CITATION.cff": r"^version: (.+)$",
}
"""Where the version stands again, and how, by file."""


def version_of(root: Path) -> str:
    """Return the version of the package in a checkout."""
    version = _value(root / "moepack" / "version.py", r'^__version__ = "(.+)"$')
    assert version is not None
    return version


def notes(root: Path) -> str:
    """Return the section of the changelog about this version, without its heading."""
    return _sections(root).get(version_of(root), ("", ""))[1]


def check_tree(root: Path) -> Iterator[str]:
    """Yield the files that differ from the last commit."""
    command = ("git", "-C", str(root), "status", "--porcelain")
    for line in subprocess.check_output(command, text=True).splitlines():
        yield f"{line[3:]}: not committed"


def check_changelog(root: Path) -> Iterator[str]:
    """Yield what the changelog lacks: this version first, with its date, and nothing unreleased."""
    sections, version = _sections(root), version_of(root)
    if sections.pop("Unreleased", ("", ""))[1]:
        yield f"CHANGELOG.md: Unreleased has contents: make its heading ## [{version}] - YYYY-MM-DD"
    if next(iter(sections), None) != version:
        yield f"CHANGELOG.md: expected ## [{version}] first, found {[*sections][:1]}"
        return
    day, text = sections[version]
    try:
        date.fromisoformat(day)
    except ValueError:
        yield f"CHANGELOG.md: expected the date of {version} as YYYY-MM-DD, found {day!r}"
    if not text:
        yield f"CHANGELOG.md: {version} has no contents"
    cited = _value(root / "CITATION.cff", r"^date-released: (.+)$")
    if cited != day:
        yield f"CITATION.cff: date-released: expected {day}, as in CHANGELOG.md, found {cited}"


def check_versions(root: Path) -> Iterator[str]:
    """Yield the files with another version than the package."""
    version = version_of(root)
    major, minor, patch = map(int, re.findall(r"\d+", version)[:3])
    number = f"{major * 10_000 + minor * 100 + patch}"
    places = [(name, pattern, version) for name, pattern in _PLACES.items()]
    pattern = r"^#define MOEPACK_VERSION_NUMBER (\d+)$"
    for name, line, expected in [*places, ("include/moepack.h", pattern, number)]:
        actual = _value(root / name, line)
        if actual != expected:
            yield f"{name}: expected version {expected}, found {actual}"


def check_conformance(root: Path) -> Iterator[str]:
    """Yield the folders of files for other implementations that are not those that were frozen."""
    for name, expected in DIGESTS.items():
        actual = digest_of_all(root / "conformance" / name)
        if actual != expected:
            yield f"conformance/{name}: expected the digest {expected}, found {actual}"


def check_documents(root: Path) -> Iterator[str]:
    """Yield the pages that `make docs` would change."""
    for path, text in command_pages.pages().items():
        name = path.relative_to(ROOT)
        if (root / name).read_text() != text:
            yield f"{name}: not as `make docs` writes it"


def check_files(root: Path) -> Iterator[str]:
    """Yield what is wrong with the files in dist/: a source archive, and a wheel for each machine.

    Each has the licence, and wheels the libraries for their machine.
    """
    version, licence = version_of(root), (root / "LICENSE").read_bytes()
    archive = f"moepack-{version}.tar.gz"
    wheels = {
        f"moepack-{version}-py3-none-manylinux_2_28_{machine}.whl": machine for machine in MACHINES
    }
    actual = {path.name for path in (root / "dist").glob("*") if path.name != ".gitignore"}
    for name in sorted({archive, *wheels} ^ actual):
        yield f"dist/{name}: {'not expected' if name in actual else 'missing: run `make wheels`'}"
    for name in sorted(wheels.keys() & actual):
        with zipfile.ZipFile(root / "dist" / name) as wheel:
            yield from _faults_of_wheel(wheel, version, licence, wheels[name])
    if archive in actual:
        with tarfile.open(root / "dist" / archive) as source:
            member = f"moepack-{version}/LICENSE"
            file = source.extractfile(member) if member in source.getnames() else None
            if file is None or file.read() != licence:
                yield f"dist/{archive}: LICENSE is not that of the checkout"


def _faults_of_wheel(
    wheel: zipfile.ZipFile, version: str, licence: bytes, machine: str
) -> Iterator[str]:
    members, name = set(wheel.namelist()), Path(str(wheel.filename)).name
    member = f"moepack-{version}.dist-info/licenses/LICENSE"
    if member not in members or wheel.read(member) != licence:
        yield f"dist/{name}: {member} is not the LICENSE of the checkout"
    for library in SOURCES:
        pattern = rf"moepack/native/{library}-\w+-{machine}-\w+\.so"
        if not any(re.fullmatch(pattern, one) for one in members):
            yield f"dist/{name}: no library {library} for {machine}"


CHECKS: dict[str, Callable[[Path], Iterator[str]]] = {
    "nothing is uncommitted": check_tree,
    "the changelog has the version and its date": check_changelog,
    "all files have the same version": check_versions,
    "the conformance files are as they were": check_conformance,
    "the pages of commands are their help": check_documents,
    "dist/ has the wheels and the source archive": check_files,
}
"""By what holds if there are no faults; in this order."""


def _value(path: Path, pattern: str) -> str | None:
    """Return what a line of a file states."""
    match = re.search(pattern, path.read_text(), re.MULTILINE) if path.exists() else None
    return match[1] if match else None


def _sections(root: Path) -> dict[str, tuple[str, str]]:
    """Return date and contents of each section of the changelog, by version."""
    text = (root / "CHANGELOG.md").read_text()
    parts = re.split(r"^## \[(.+?)\](?: - )?(.*)$", text, flags=re.MULTILINE)[1:]
    rows = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {version: (day, contents.strip()) for version, day, contents in rows}
