"""The preloaded library is found with the package, in the user's cache, or made now."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from moepack.common.errors import MachineError
from moepack.running.programs.compiling import compile_library
from moepack.running.programs.runner import find_library
from tests.support.children import run_child
from tests.support.preloaded import write_source


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moepack"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    return write_source(tmp_path / "package")


def test_what_the_package_brought_is_used(cache: Path, source: Path) -> None:
    library = compile_library(source, source.parent)
    assert find_library(source, compilers=[]) == library
    assert not cache.exists()


def test_the_first_use_compiles_and_the_next_finds_it(cache: Path, source: Path) -> None:
    library = find_library(source)
    assert library.parent == cache
    assert find_library(source, compilers=[]) == library


def test_another_system_is_refused_by_its_name(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(MachineError, match="on Linux, not on Darwin"):
        find_library(source)


def test_without_a_compiler_the_hint_says_what_to_install(cache: Path, source: Path) -> None:
    with pytest.raises(MachineError, match="no C compiler is installed") as caught:
        find_library(source, compilers=[])
    assert "apt install gcc" in str(caught.value.hint)
    assert "pip install ziglang" in str(caught.value.hint)


def test_without_a_cache_it_lies_in_a_folder_that_goes_away(cache: Path, source: Path) -> None:
    cache.parent.write_text("a file, where a folder is to be")
    code = """
        import pathlib, sys
        from moepack.running.programs.runner import find_library
        print(find_library(pathlib.Path(sys.argv[1])))
    """
    library = Path(run_child(code, source).strip())
    assert library.name.startswith("preload-")
    assert not library.parent.exists()


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_write_to_is_not_used(cache: Path, source: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    library = find_library(source)
    assert library.parent != cache
    assert not list(cache.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_used(cache: Path, source: Path) -> None:
    library = find_library(source)
    os.chown(library, 65534, 65534)
    with pytest.raises(MachineError):
        find_library(source, compilers=[])


def test_a_path_that_the_dynamic_linker_would_split_is_left_for_another(
    cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    source = write_source(folder)
    compile_library(source, folder)
    library = find_library(source, compilers=[])
    assert library.parent == cache
    environment = os.environ | {"LD_PRELOAD": str(library), "TELL": "1"}
    output = subprocess.check_output([shutil.which("true") or ""], env=environment, text=True)
    assert output == "loaded\n"


def test_where_no_folder_will_do_the_hint_names_tmpdir(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.write_text("no folder")
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a b"))
    with pytest.raises(MachineError, match="spaces") as caught:
        find_library(source)
    assert caught.value.hint == "set TMPDIR to another folder"
