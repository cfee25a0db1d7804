"""Programs are checked before they are started: a library cannot be loaded into all of them."""

import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.running.programs.compiling import compile_library
from moepack.running.programs.executable import CommandError, check_executable, find_executable
from tests.support.children import PATIENCE
from tests.support.needs import needs_library
from tests.support.preloaded import write_native

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")


def compiled(path: Path, *flags: str) -> Path:
    source = path.with_suffix(".c")
    source.write_text("int main(void) { return 0; }\n")
    if shutil.which("cc") is None:
        pytest.skip("there is no cc here")
    run = subprocess.run(["cc", source, "-o", path, *flags], capture_output=True, timeout=PATIENCE)
    if run.returncode:
        pytest.skip(f"cc {' '.join(flags)} makes no programs here")
    return path


def refusal(path: Path) -> CommandError:
    with pytest.raises(CommandError) as caught:
        check_executable(path)
    assert caught.value.exit_code == 126
    assert caught.value.hint
    return caught.value


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    return compiled(tmp_path / "dynamic")


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a library that says when it is loaded."""
    native = write_native(tmp_path_factory.mktemp("preloaded"))
    return compile_library(native, "seam", native)


def says_loaded(path: Path, preloaded: Path, **options: int) -> bool:
    """Start a program with the library preloaded, and return whether it was loaded."""
    environment = {"LD_PRELOAD": str(preloaded), "TELL": "1"}
    output = subprocess.run([path], env=environment, stdout=subprocess.PIPE, **options).stdout  # type: ignore[call-overload]
    return bool(output == b"loaded\n")


def test_programs_of_every_day_and_the_dynamic_linker_itself_pass() -> None:
    paths = [Path(sys.executable), *Path("/lib64").glob("ld-linux*")]
    paths += [find_executable(name) for name in ("sh", "npx", "cc") if shutil.which(name)]
    for path in paths:
        check_executable(path)


def test_programs_of_containers_are_told_so_however_they_are_linked(tmp_path: Path) -> None:
    for name, flags in (("docker", ["-static"]), ("podman", [])):
        error = refusal(compiled(tmp_path / name, *flags))
        assert "in the container" in (error.hint or "")
        assert "dynamic" not in str(error) + (error.hint or "")


@needs_library
@pytest.mark.parametrize("flag", ["-static", "-static-pie"])
def test_a_static_program_is_refused_and_indeed_loads_nothing(
    flag: str, tmp_path: Path, dynamic: Path, preloaded: Path
) -> None:
    static = compiled(tmp_path / "static", flag)
    assert "linked statically" in str(refusal(static))
    assert not says_loaded(static, preloaded)
    check_executable(dynamic)
    assert says_loaded(dynamic, preloaded)


@needs_library
@as_root
@pytest.mark.parametrize("bit", [stat.S_ISUID, stat.S_ISGID])
def test_a_program_with_others_rights_is_refused_and_indeed_loads_nothing(
    bit: int, dynamic: Path, preloaded: Path
) -> None:
    dynamic.chmod(0o755 | bit)
    check_executable(dynamic)  # root's program is nothing more in root's hands
    assert says_loaded(dynamic, preloaded)
    os.chown(dynamic, NOBODY, NOBODY)
    dynamic.chmod(0o755 | bit)
    assert "setuid" in str(refusal(dynamic)) or "setgid" in str(refusal(dynamic))
    assert not says_loaded(dynamic, preloaded)
    if bit == stat.S_ISGID:
        dynamic.chmod(0o705 | bit)  # which means something else
        check_executable(dynamic)
        assert says_loaded(dynamic, preloaded)


@needs_library
@as_root
def test_a_program_with_capabilities_is_refused_unless_root_runs_it(preloaded: Path) -> None:
    setcap = shutil.which("setcap") or shutil.which("setcap", path="/usr/sbin:/sbin")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = compiled(Path(folder, "program"))
        if setcap is None or subprocess.run([setcap, "cap_net_raw+ep", program]).returncode:
            pytest.skip("no capabilities can be given to files here")
        check_executable(program)
        assert says_loaded(program, preloaded)
        child = os.fork()
        if child == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                check_executable(program)
            except CommandError as error:
                os._exit(0 if "capabilities" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("offset", "content"), [(18, struct.pack("<H", 243)), (4, b"\1"), (5, b"\2")]
)
def test_programs_of_other_machines_are_refused(offset: int, content: bytes, dynamic: Path) -> None:
    image = bytearray(dynamic.read_bytes())
    image[offset : offset + len(content)] = content
    dynamic.write_bytes(image)
    assert "for another machine" in str(refusal(dynamic))


def test_a_program_of_another_c_library_is_named(dynamic: Path) -> None:
    image = dynamic.read_bytes()
    start = image.index(b"/lib64/ld-linux") if b"/lib64/ld-linux" in image else 0
    if not start:
        pytest.skip("the dynamic linker has another name here")
    end = image.index(b"\0", start)
    dynamic.write_bytes(
        image[:start] + b"/lib/ld-musl.so.1".ljust(end - start, b"\0") + image[end:]
    )
    assert "linked with musl, while moepack's library is with glibc" in str(refusal(dynamic))


HEADER = st.binary(min_size=64, max_size=400)


@given(tail=HEADER, ident=st.sampled_from([b"\2\1", b"\1\1", b"\2\2", b"\7\7"]), data=st.data())
def test_senseless_headers_are_refused_or_pass(
    tail: bytes, ident: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "senseless"
    machine = data.draw(st.sampled_from([b"\x3e\0", tail[12:14]]))
    sizes = data.draw(st.sampled_from([struct.pack("<HH", 56, 1), tail[48:52]]))
    offset = data.draw(st.sampled_from([struct.pack("<Q", 64), b"\xff" * 8, tail[26:34]]))
    image = bytearray(b"\x7fELF" + ident + tail)
    image[18:20], image[32:40], image[54:58] = machine, offset, sizes
    for content in (image, image[: data.draw(st.integers(0, len(image)))]):
        path.write_bytes(content)
        with suppress(CommandError):
            check_executable(path)


def test_what_path_has_is_found_as_shells_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").write_text("")
    (tmp_path / "second" / "tool").chmod(0o755)
    monkeypatch.chdir(tmp_path / "second")
    monkeypatch.setenv("PATH", f"{tmp_path}/none:{tmp_path}/first:{tmp_path}/second")
    assert find_executable("./tool") == Path("./tool")
    assert find_executable("tool") == tmp_path / "second" / "tool"
    for command, code, words in (
        ("missing", 127, "no such program"),
        ("", 127, "no such program"),
        ("./missing", 127, "no such program"),
        ("../first/tool", 126, "not an executable file"),
        ("../first", 126, "not an executable file"),
    ):
        with pytest.raises(CommandError, match=words) as caught:
            find_executable(command)
        assert caught.value.exit_code == code
