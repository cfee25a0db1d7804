"""What all tests are given: packs of the real models, and the command."""

import gc
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import moepack
from moepack.pack.reading.pack import Pack
from moepack.running.programs.compiling import CompileError, compile_in_place
from moepack.running.programs.library import native_folder
from tests.support import measurements, warm_command
from tests.support.chat_model import write_chat_model
from tests.support.children import MOEPACK, run_command
from tests.support.faulty_backend import NAMES, require
from tests.support.machine_faults import Room
from tests.support.models import FIXTURES, REAL_MODELS, first_shard, pack_model
from tests.support.native import compile_with
from tests.support.pulls import copy_pack, store_of_packs
from tests.support.remote_servers import FileServer
from tests.support.warm_command import Run

# Random tests without settings of their own; `make fuzz` has tests that look much further.
hypothesis.settings.register_profile("moepack", max_examples=30, deadline=None)
hypothesis.settings.load_profile("moepack")

# A shell ignores SIGINT and SIGQUIT in what it starts in the background, and children inherit that:
# programs that tests interrupt would never hear of it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Commands keep what they print in buffers, as those of users do, and lose none of it.
os.environ.pop("PYTHONUNBUFFERED", None)

# llama.cpp's threads wait for each other all the time: in tests, which share few processors with
# others, they are not to wait busily. It is read when the library is loaded, in children as well.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What tests have chosen is not counted for the user who runs them, and changes no other test.
os.environ["MOEPACK_LEARN"] = "0"
os.environ["MOEPACK_PROMPT_CACHE"] = "0"

# Not each test compiles `native/` that has a cache of its own; and other conftests, which are read
# before any hook is called, ask whether its libraries are there.
if "PYTEST_XDIST_WORKER" not in os.environ:
    with suppress(CompileError, OSError):
        compile_in_place(native_folder())

measurements.shorten()

LONG_FOLDERS = {
    *("faults", "hostile", "c_header", "formats", "analysis", "bench"),
    *("running", "simulation", "programs", "supervisor"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start two workers a processor: tests wait for disks, signals and children."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long by where it stands, and what runs the command."""
    for item in items:
        folders = set(item.path.relative_to(Path(__file__).parent).parts)
        if folders & LONG_FOLDERS or "cli" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Keep the thousands of collected tests out of what each `gc.collect()` looks through."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Do the same with what is left when a file's tests are done: modules, and what is cached."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what this machine lacks, and how many tests were skipped for it."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture
def cli() -> Run:
    """Run the `moepack` command in a process of its own."""

    def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        if not options.keys() - warm_command.OPTIONS:
            return warm_command.run(list(map(str, arguments)), **options)
        return run_command(*MOEPACK, *arguments, **{"timeout": 120, **options})

    return run


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return gpt-oss-120b with its real dimensions, 57 GiB of experts, without its bytes."""
    from tests.support import large_models

    return large_models.write("gpt-oss-120b", tmp_path_factory.mktemp("large") / "model.gguf")


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pack each real model once, read-only for all tests."""
    folder = tmp_path_factory.mktemp("packs")
    for model in REAL_MODELS:
        pack_model([first_shard(model)], folder / model)
    return {model: folder / model for model in REAL_MODELS}


@pytest.fixture(scope="session")
def hot_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack qwen3moe with its hotness, read-only for all tests."""
    folder = tmp_path_factory.mktemp("hot") / "pack"
    moepack.pack_model(first_shard("qwen3moe"), folder, hotness=FIXTURES / "qwen3moe-hotness.csv")
    return folder


@pytest.fixture
def store(hot_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Serve `hot_pack` as a web server does, in a folder of its own."""
    copy_pack(hot_pack, tmp_path / "store")
    with store_of_packs(tmp_path / "store", monkeypatch) as server:
        yield server


@pytest.fixture
def address(store: FileServer) -> str:
    """Return the address of the pack in the store."""
    return f"{store.url}/a.moepack"


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, packs: dict[str, Path]) -> str:
    """Name each backend that works here."""
    return require(request.param, packs["qwen3moe"])


@pytest.fixture
def pack(packs: dict[str, Path]) -> Iterator[Pack]:
    """Open the pack of qwen3moe."""
    with moepack.open(packs["qwen3moe"]) as opened:
        yield opened


@pytest.fixture
def pack_copy(packs: dict[str, Path], tmp_path: Path) -> Path:
    """Copy the pack of qwen3moe, for a test that damages it."""
    return Path(shutil.copytree(packs["qwen3moe"], tmp_path / "pack"))


@pytest.fixture(scope="session")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a template for chats."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "chat.gguf")


@pytest.fixture
def room() -> Iterator[Room]:
    """Open a mount namespace of its own."""
    with Room() as opened:
        yield opened


@pytest.fixture(scope="session")
def ggml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile as much of ggml as routers need."""
    library = tmp_path_factory.mktemp("ggml") / "libggml.so"
    source = Path(__file__).parent / "support" / "chooser.c"
    compile_with("cc", "-shared", "-fPIC", "-O1", "-o", library, source)
    return library
