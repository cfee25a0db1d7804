"""Who may import whom: rooms are layers, data moves one way, the reading side stands alone."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "moepack"

# Each room and the rooms that its modules may know, lower ones first. What is not in a row is
# forbidden; `moepack` is what stands beside the rooms, for all of them.
MAY_IMPORT: dict[str, set[str]] = {
    "format": {"moepack"},
    "storage": {"moepack", "format"},
    "source": {"moepack", "storage"},
    "reading": {"moepack", "format", "storage"},
    "verifying": {"moepack", "format", "storage", "source", "reading"},
    "llama_cpp": {"moepack"},
    "trace": {"moepack", "storage"},
    "trace.formats": {"moepack", "source", "reading", "trace"},
    "hotness": {"moepack", "storage", "reading", "trace", "trace.formats"},
    "caching": {"moepack"},
    "simulation": {"moepack", "trace", "trace.formats", "caching"},
    "analysis": {"moepack", "trace", "trace.formats", "hotness", "simulation"},
    "packing": {"moepack", "format", "storage", "source", "reading", "hotness"},
    "machine": {"moepack"},
    "engines": {"moepack", "format", "storage", "source", "reading"},
    "footprint": {"moepack", "source", "reading", "engines"},
    "forecasting": {
        *("moepack", "reading", "trace.formats", "machine", "simulation", "footprint"),
    },
    "placing": {
        *("moepack", "source", "reading", "trace.formats", "hotness", "analysis", "machine"),
        *("simulation", "footprint", "forecasting"),
    },
    "mounting": {"moepack", "format", "storage", "reading"},
    "pager": {"moepack", "format", "storage", "reading", "caching", "machine", "engines"},
    "programs": {
        *("moepack", "storage", "reading", "hotness", "analysis", "packing", "engines", "trace"),
        *("machine", "footprint", "pager"),
    },
    "trace.recording": {
        *("moepack", "source", "reading", "llama_cpp", "trace", "packing", "machine", "pager"),
        "programs",
    },
    "bench": {
        *("moepack", "storage", "source", "reading", "packing", "footprint", "pager", "programs"),
        *("trace", "trace.formats", "hotness", "machine"),
    },
    "diagnosis": {
        *("moepack", "storage", "llama_cpp", "pager", "programs", "machine", "footprint"),
        *("forecasting", "bench"),
    },
    "report": {
        *("moepack", "format", "storage", "source", "reading", "verifying", "trace", "hotness"),
        *("analysis", "packing", "engines", "mounting", "machine", "bench"),
        *("pager", "programs"),
        *("simulation", "forecasting", "placing", "diagnosis"),
    },
    "cli": {"*"},
}
BESIDE = {
    "__init__",
    "__main__",
    "aio",
    "digest",
    "errors",
    "escaping",
    "extras",
    "installed",
    "keys",
    "path_hints",
    "paths",
    "phases",
    "shape",
    "sizes",
    "strict_json",
    "version",
}
"""The modules beside the rooms."""

DOORS = {
    "__init__": {
        *("storage", "reading", "verifying", "trace.formats", "trace.recording"),
        *("hotness", "analysis", "packing", "engines", "mounting", "bench", "report"),
        *("simulation", "forecasting", "placing", "programs", "diagnosis"),
    },
    "__main__": {"cli"},
    "aio": {"reading", "storage"},
}
"""Those of them that are doors, and where they lead."""

LIBRARIES = {
    "click": ("cli",),
    "gguf": ("verifying.gguf_py", "reading.tensors"),
    "tqdm": ("cli.progress",),
    "xxhash": ("digest",),
    "zstandard": ("trace", "storage.frames"),
}
"""What moepack depends on, and where alone it is known; numpy any room may know."""

EXTRAS = {"prompt_toolkit": ("cli.line_editor",)}
"""What an extra brings, and where alone it is known."""


MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
)
"""All modules, by their names without `moepack.`"""


@cache
def tree(module: str) -> ast.Module:
    """Return the text of a module, as Python understands it."""
    return ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())


def room_of(module: str) -> str:
    """Name the room of a module; `moepack` for what stands beside the rooms."""
    return module.rpartition(".")[0] or "moepack"


@cache
def imports(module: str) -> tuple[set[str], set[str]]:
    """List the modules of moepack, and the others, that a module imports anywhere in its text."""
    ours: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports by a relative name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package != "moepack":
                others.add(package)
                continue
            while rest and rest not in MODULES and f"{rest}.__init__" not in MODULES:
                rest = rest.rpartition(".")[0]
            ours.add(rest if rest in MODULES else f"{rest}.__init__".lstrip("."))
    return ours, others


def test_the_table_names_every_room() -> None:
    rooms = {room_of(module) for module in MODULES} - {"moepack"}
    assert rooms == set(MAY_IMPORT)
    assert {module for module in MODULES if room_of(module) == "moepack"} == BESIDE


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_says_what_it_knows(room: str) -> None:
    text = tree(f"{room}.__init__")
    assert ast.get_docstring(text), "a paragraph for a stranger"
    assert len(text.body) == 1, "no import that would make `import moepack` slow"


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_knows_only_what_comes_before_it(room: str) -> None:
    known = {
        room_of(other)
        for module in MODULES
        if room_of(module) == room
        for other in imports(module)[0]
    } - {room}
    allowed = MAY_IMPORT[room]
    assert known <= allowed or "*" in allowed
    assert known >= allowed - {"*"}, "the table allows what nobody needs"


def test_no_room_runs_back() -> None:
    order = ["moepack", *MAY_IMPORT]
    for room, allowed in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(room) for other in allowed - {"*"}), room


@pytest.mark.parametrize("module", sorted(BESIDE))
def test_what_stands_beside_the_rooms_knows_none_of_them_but_doors_do(module: str) -> None:
    rooms = {room_of(other) for other in imports(module)[0]} - {"moepack"}
    assert rooms == DOORS.get(module, set())


def test_no_circle_stands_anywhere_not_even_for_types() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in sorted(imports(module)[0]):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_a_library_is_known_in_one_place(module: str) -> None:
    places = LIBRARIES | EXTRAS
    for library in imports(module)[1] & places.keys():
        assert f"{module}.".startswith(tuple(f"{place}." for place in places[library])), library


def test_what_moepack_depends_on_is_what_it_imports() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    table = (PACKAGE.parent / "docs" / "development.md").read_text()
    assert all(f"\n| `{library}` | " in table for library in LIBRARIES)
    declared = {re.split(r"[^\w-]", text)[0] for text in project["dependencies"]}
    assert declared == LIBRARIES.keys() | {"numpy"}
    assert declared <= set().union(*(imports(module)[1] for module in MODULES))


def test_a_room_neither_prints_nor_imports_by_text() -> None:
    for module in MODULES:
        if module in DOORS or module.startswith("cli."):
            continue
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Name):
                assert node.id not in {"print", "__import__"}, module
            # The streams of other processes are theirs, and the server is a program of its own.
            if isinstance(node, ast.Attribute) and module != "programs.server":
                is_ours = isinstance(node.value, ast.Name) and node.value.id == "sys"
                assert not (is_ours and node.attr in {"stdout", "stderr"}), module


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("cli.")])
def test_text_goes_to_the_streams_through_one_door(module: str) -> None:
    """Which makes it safe for terminals. Raw bytes of files, which `.buffer` takes, are no text."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and module != "cli.terminal":
            assert ast.unparse(node.func) not in {
                *("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"),
                *("sys.stdout.writelines", "sys.stderr.writelines", "os.write"),
            }


def test_importing_the_reading_side_loads_nothing_that_only_packing_needs() -> None:
    code = "import sys, moepack; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    ours = {name.partition(".")[2] for name in loaded if name.startswith("moepack.")}
    rooms = {room_of(name) for name in ours if name not in MAY_IMPORT}
    assert rooms == {"moepack", "format", "reading", "storage"}
    what_reads = {"ring", "io_uring", "threaded", "probe", "open_files", "aligned_read"}
    assert not {f"storage.{name}" for name in what_reads} & ours  # it comes with the first reader
    assert not loaded & (LIBRARIES.keys() - {"xxhash"})
    assert not loaded & {"tomllib", "dataclasses", "asyncio"}
    assert not loaded & {"ctypes", "inspect", "logging", "multiprocessing", "subprocess"}


@pytest.mark.parametrize("program", ["-m", "/usr/bin/moepack", "other.py", ""])
def test_the_program_loads_no_room_before_it_can_say_that_it_was_interrupted(program: str) -> None:
    code = f"import sys; sys.argv[0] = {program!r}; import moepack\n"
    code += "print('moepack.errors' in sys.modules, moepack.Pack.__name__, moepack.open.__name__)\n"
    code += "print(all(hasattr(moepack, name) for name in moepack.__all__), hasattr(moepack, 'x'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    is_library = program in ("other.py", "")
    assert run.stdout == f"{is_library} Pack open\nTrue False\n"


def test_tests_have_the_rooms_of_the_package_and_share_by_support_alone() -> None:
    tests = PACKAGE.parent / "tests"
    beside = {"support", "faults", "hostile", "c_header"}
    for path in tests.rglob("test_*.py"):
        folder = ".".join(path.parent.relative_to(tests).parts)
        assert not folder or folder in beside or folder in MAY_IMPORT, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                assert (node.module or "").startswith("tests.support"), path


def test_modules_are_read_in_one_sitting() -> None:
    for module in MODULES:
        text = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        assert text.count("\n") <= 400, module
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef):
                body = (node.end_lineno or 0) - (node.body[0].end_lineno or 0)
                assert body < 50, (module, node.name)
