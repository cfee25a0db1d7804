"""A release is checked: each rule that is broken alone is found, and nothing else.

The checkout of these tests is small: what the checks read, and files that stand for those in dist/.
"""

import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import moepack
from moepack.pack.format import records
from moepack.running.programs.compiling import MACHINES, SOURCES
from moepack.traces import file as trace_file
from releasing import checks, trying
from tests.support.children import run_command
from tests.support.light_folder import tmp_path

__all__ = ["tmp_path"]

ROOT = Path(__file__).parent.parent
VERSION = moepack.__version__
DAY = "2026-11-30"
WHEEL = f"dist/moepack-{VERSION}-py3-none-manylinux_2_28_x86_64.whl"
ARCHIVE = f"dist/moepack-{VERSION}.tar.gz"
Change = Callable[[Path], None]


def write_wheel(path: Path, machine: str, *, licence: str | None = None, without: str = "") -> None:
    """Write what a wheel has that is checked."""
    with zipfile.ZipFile(path, "w") as wheel:
        for library in SOURCES:
            if library != without:
                wheel.writestr(f"moepack/native/{library}-01ab-{machine}-23cd.so", b"")
        text = (ROOT / "LICENSE").read_text() if licence is None else licence
        wheel.writestr(f"moepack-{VERSION}.dist-info/licenses/LICENSE", text)


def write_archive(path: Path, licence: bytes) -> None:
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(f"moepack-{VERSION}/LICENSE")
        member.size = len(licence)
        archive.addfile(member, io.BytesIO(licence))


def git(root: Path, *arguments: str) -> None:
    name = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    subprocess.run(("git", "-C", str(root), *name, *arguments), check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make files from which a release can be made."""
    for name in ("LICENSE", ".gitignore", "CITATION.cff", "moepack/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("include", "docs/commands"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "conformance").mkdir()
    for name in ("packs", "traces"):
        (tmp_path / "conformance" / name).symlink_to(ROOT / "conformance" / name)
    citation = re.sub(r"^date-released: .*\n", "", (ROOT / "CITATION.cff").read_text(), flags=re.M)
    (tmp_path / "CITATION.cff").write_text(f"{citation}date-released: {DAY}\n")
    log = f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - {DAY}\n\n### Added\n\n- All.\n"
    (tmp_path / "CHANGELOG.md").write_text(log)
    (tmp_path / "dist").mkdir()
    for machine in MACHINES:
        write_wheel(tmp_path / WHEEL.replace("x86_64", machine), machine)
    write_archive(tmp_path / ARCHIVE, (ROOT / "LICENSE").read_bytes())
    return tmp_path


def test_a_checkout_that_can_be_released_has_no_faults(checkout: Path) -> None:
    git(checkout, "init", "--quiet")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "All")
    assert [fault for check in checks.CHECKS.values() for fault in check(checkout)] == []
    assert checks.notes(checkout) == "### Added\n\n- All."
    for name in ("new.txt", "LICENSE.old"):
        (checkout / name).touch()
    expected = ["LICENSE.old: not committed", "new.txt: not committed"]
    assert list(checks.check_tree(checkout)) == expected


def replaced(name: str, old: str, new: str) -> Change:
    """Return a change of a text in a file."""

    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new, 1))

    return change


def change_conformance(root: Path) -> None:
    folder = root / "conformance" / "traces"
    source = folder.resolve()
    folder.unlink()
    shutil.copytree(source, folder)
    (folder / "verdicts.json").write_text("[]")


FAULTS: dict[str, list[tuple[Change, str]]] = {
    "check_changelog": [
        (
            replaced("CHANGELOG.md", "Unreleased]\n", "Unreleased]\n\n- More.\n"),
            f"CHANGELOG.md: Unreleased has contents: make its heading ## [{VERSION}] - YYYY-MM-DD",
        ),
        (
            replaced("CHANGELOG.md", f"[{VERSION}]", "[0.0.9]"),
            f"CHANGELOG.md: expected ## [{VERSION}] first, found ['0.0.9']",
        ),
        (
            replaced("CHANGELOG.md", "### Added\n\n- All.\n", ""),
            f"CHANGELOG.md: {VERSION} has no contents",
        ),
        (
            replaced("CITATION.cff", DAY, "2026-12-01"),
            f"CITATION.cff: date-released: expected {DAY}, as in CHANGELOG.md, found 2026-12-01",
        ),
    ],
    "check_versions": [
        (replaced(name, old, new), f"{name}: expected version {expected}, found {actual}")
        for name, old, new, expected, actual in (
            ("include/moepack.h", f'"{VERSION}"', '"0.0.9"', VERSION, "0.0.9"),
            ("include/moepack.h", "_VERSION_NUMBER ", "_VERSION_NUMBER 9", "100", "9100"),
            ("include/pkgconfig/moepack.pc", VERSION, "0.0.9", VERSION, "0.0.9"),
            ("include/pkgconfig/moepack.pc", "Version:", "Number:", VERSION, "None"),
            ("CITATION.cff", f"version: {VERSION}", "version: 0.0.9", VERSION, "0.0.9"),
            ("include/cmake/moepack-config-version.cmake", VERSION, "0.0.9", VERSION, "0.0.9"),
        )
    ],
    "check_conformance": [(change_conformance, "conformance/traces: expected the digest ")],
    "check_documents": [
        (
            replaced("docs/commands/verify.md", "# moepack verify", "# verify"),
            "docs/commands/verify.md: not as `make docs` writes it",
        )
    ],
    "check_files": [
        (lambda root: (root / WHEEL).unlink(), f"{WHEEL}: missing: run `make wheels`"),
        (lambda root: (root / ARCHIVE).unlink(), f"{ARCHIVE}: missing: run `make wheels`"),
        (lambda root: (root / "dist" / "old.whl").touch(), "dist/old.whl: not expected"),
        (
            lambda root: write_wheel(root / WHEEL, "x86_64", licence="Mine."),
            f"{WHEEL}: moepack-{VERSION}.dist-info/licenses/LICENSE is not the LICENSE of the",
        ),
        (
            lambda root: write_wheel(root / WHEEL, "x86_64", without="cache"),
            f"{WHEEL}: no library cache for x86_64",
        ),
        (
            lambda root: write_archive(root / ARCHIVE, b"Mine."),
            f"{ARCHIVE}: LICENSE is not that of the checkout",
        ),
    ],
}
"""What is wrong, and how it is named, by the check that finds it."""


@pytest.mark.parametrize(
    ("check", "change", "fault"),
    [(check, *one) for check, several in FAULTS.items() for one in several],
)
def test_what_is_wrong_is_named_alone(
    check: str, change: Change, fault: str, checkout: Path
) -> None:
    change(checkout)
    (actual,) = getattr(checks, check)(checkout)
    assert actual.startswith(fault)


def test_a_date_that_is_none_is_named(checkout: Path) -> None:
    for name in ("CHANGELOG.md", "CITATION.cff"):
        replaced(name, DAY, "soon")(checkout)
    expected = f"CHANGELOG.md: expected the date of {VERSION} as YYYY-MM-DD, found 'soon'"
    assert list(checks.check_changelog(checkout)) == [expected]


def test_a_new_version_is_wanted_everywhere(checkout: Path) -> None:
    replaced("moepack/version.py", VERSION, "9.8.7")(checkout)
    assert len(list(checks.check_versions(checkout))) == 5
    assert "90807" in "".join(checks.check_versions(checkout))


@pytest.mark.parametrize(
    ("name", "is_tried"),
    [
        ("moepack-1-py3-none-any.whl", True),
        ("moepack-1.tar.gz", True),
        ("moepack-1-py3-none-manylinux_2_28_x86_64.whl", True),
        ("moepack-1-py3-none-manylinux_2_28_aarch64.whl", False),
        ("moepack-1-py3-none-macosx_11_0_x86_64.whl", False),
    ],
)
def test_files_for_this_machine_are_tried(
    name: str, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert trying.is_for_this_machine(Path(name)) == is_tried


@pytest.mark.slow
def test_what_make_wheels_makes_can_be_released_and_used(tmp_path: Path) -> None:
    """One without a library cannot."""
    pytest.importorskip("ziglang")
    root = tmp_path / "clone"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist"))
    for kind, machine in (("sdist", ""), *(("wheel", name) for name in MACHINES)):
        command = f"MOEPACK_WHEEL_MACHINE={machine} {sys.executable} -m hatchling build -t {kind}"
        subprocess.run(["sh", "-c", command], cwd=root, check=True)
    assert list(checks.check_files(root)) == []
    files = sorted((root / "dist").iterdir())
    script = root / "releasing" / "trying.py"
    done = run_command(sys.executable, script, *files)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("installed alone, and used") == 2
    wheel = next(file for file in files if trying.is_for_this_machine(file))
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / wheel.name, "w") as part:
        for name in whole.namelist():
            part.writestr(name, b"" if "native/cache-" in name else whole.read(name))
    done = run_command(sys.executable, script, tmp_path / wheel.name)
    assert done.returncode == 1
    assert "no undamaged library cache" in done.stdout


def test_the_page_of_versions_has_those_of_the_code() -> None:
    header = (ROOT / "include" / "moepack.h").read_text()
    defined = dict(re.findall(r'^#define (MOEPACK_VERSION\w*) "?([^"\n]+)"?$', header, re.M))
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d[\d.]*) \|", page, re.MULTILINE)
    assert dict(rows) == {
        "the package": VERSION,
        "packs": str(records.FORMAT_VERSION),
        "trace files": str(trace_file.VERSION),
        "C headers": defined["MOEPACK_VERSION"],
        "C headers, for `#if`": defined["MOEPACK_VERSION_NUMBER"],
    }
    assert page.count("\n") <= 60


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.name)
def test_a_workflow_is_pinned_and_may_only_read(path: Path) -> None:
    """Jobs that need more say so themselves."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for line in re.findall(r"uses: (.*)", path.read_text()):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job


def test_workflows_try_all_pythons_that_are_promised() -> None:
    (oldest,) = re.findall(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    for name, job in (("ci", "linux"), ("release", "try")):
        workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        versions = workflow["jobs"][job]["strategy"]["matrix"]["python"]
        assert versions == [f"3.{minor}" for minor in range(int(oldest), 15)]


@pytest.mark.parametrize("name", ["bug", "slow", "idea"])
def test_a_form_asks_for_the_machine(name: str) -> None:
    path = ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml"
    labels = [one["attributes"]["label"] for one in yaml.safe_load(path.read_text())["body"]]
    assert any("moepack doctor --json" in label for label in labels)
