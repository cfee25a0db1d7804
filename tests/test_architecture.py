"""Who may import whom: rooms are layers, data moves one way, the reading side stands alone."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.support.children import run_child

PACKAGE = Path(__file__).parent.parent / "moepack"

WINGS: dict[str, set[str]] = {
    "common": set(),
    "host": {"common"},
    "storage": {"common"},
    "source": {"common", "storage"},
    "pack": {"common", "storage", "source"},
    "traces": {"common", "storage", "source", "pack"},
    "packing": {"common", "storage", "source", "pack", "traces"},
    "planning": {"common", "source", "pack", "traces"},
    "inspection": {"common", "source", "pack", "traces"},
    "running": {"common", "host", "storage", "pack", "traces", "packing", "planning"},
    "bench": {
        *("common", "host", "storage", "source", "pack", "traces", "packing", "planning"),
        "running",
    },
    "report": {
        *("common", "storage", "source", "pack", "traces", "packing", "planning", "inspection"),
        *("running", "bench"),
    },
    "cli": {
        *("common", "host", "storage", "pack", "traces", "packing", "planning", "inspection"),
        *("running", "bench", "report"),
    },
}
"""The folders of the package, and those that each may import: all of them stand above it."""

ROOMS = {
    "storage": ("remote", ""),
    "pack": ("format", "reading", "opening", "verifying", "engines", "mounting"),
    "traces": ("", "caching", "formats", "hotness", "simulation", "analysis"),
    "packing": ("plan", "writing", "in_place", "copies", ""),
    "planning": ("machine", "footprint", "forecasting", "placing"),
    "running": ("streaming", "programs", "serving", ""),
    "bench": ("", "diagnosis"),
    "report": ("", "html"),
    "cli": ("shared", "words", "running", ""),
}
"""The rooms of those that have several; each may import those before it; "" is the folder."""

DOORS = {
    "__init__": {
        *("common", "pack", "traces", "packing", "planning", "inspection", "running"),
        *("bench", "report"),
    },
    "__main__": {"cli"},
    "version": set(),
}
"""The modules beside the folders, and where they lead."""

LIBRARIES = {
    "click": ("cli",),
    "gguf": ("pack.verifying.gguf_py", "pack.reading.tensors"),
    "xxhash": ("common.digest",),
    "zstandard": ("traces", "storage.frames"),
}
"""What moepack depends on, and where alone it is known; numpy any room may know."""

EXTRAS = {
    "huggingface_hub": ("storage.remote.hub",),
    "jinja2": ("report.html.report",),
    "obstore": ("storage.remote.store", "storage.remote.stores"),
    "prompt_toolkit": ("cli.running.line_editor",),
}
"""What an extra brings, and where alone it is known."""


MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
)
"""All modules, by their names without `moepack.`"""


@cache
def tree(module: str) -> ast.Module:
    """Return the text of a module, as Python understands it."""
    return ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())


@cache
def nodes(module: str) -> list[ast.AST]:
    """List all that stands in a module."""
    return list(ast.walk(tree(module)))


def wing_of(module: str) -> str:
    """Return the folder at the top that a module lies in; "" for what stands beside them."""
    wing, _, rest = module.partition(".")
    return wing if rest else ""


def room_of(module: str) -> str:
    """Return the room of a module within its wing."""
    return ".".join(module.split(".")[1:-1])


@cache
def imports(module: str) -> tuple[set[str], set[str]]:
    """List the modules of moepack, and the others, that a module imports anywhere in its text."""
    ours: set[str] = set()
    others: set[str] = set()
    for node in nodes(module):
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


def test_the_tables_name_every_room() -> None:
    assert {wing_of(module) for module in MODULES} - {""} == WINGS.keys()
    assert {module for module in MODULES if not wing_of(module)} == DOORS.keys()
    for wing in WINGS:
        rooms = {room_of(module) for module in MODULES if wing_of(module) == wing}
        assert rooms | {""} == {*ROOMS.get(wing, ()), ""}, wing


def test_a_room_says_what_it_knows() -> None:
    for module in MODULES:
        if module.endswith(".__init__"):
            assert ast.get_docstring(tree(module)), (module, "a paragraph for a stranger")
            assert len(tree(module).body) == 1, (module, "imports make `import moepack` slow")


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_knows_only_what_comes_before_it(wing: str) -> None:
    others = {
        wing_of(other)
        for module in MODULES
        if wing_of(module) == wing
        for other in imports(module)[0]
    } - {wing, ""}
    assert others == WINGS[wing]
    order = [*WINGS]
    assert all(order.index(other) < order.index(wing) for other in others), "it runs back"


@pytest.mark.parametrize("wing", ROOMS)
def test_a_room_knows_only_those_before_it(wing: str) -> None:
    order = ROOMS[wing]
    for module in MODULES:
        for other in imports(module)[0] if wing_of(module) == wing else ():
            if wing_of(other) == wing and not module.endswith("__init__"):
                assert order.index(room_of(other)) <= order.index(room_of(module)), module


@pytest.mark.parametrize("module", DOORS)
def test_what_stands_beside_the_wings_leads_where_the_table_says(module: str) -> None:
    assert {wing_of(other) for other in imports(module)[0]} - {""} == DOORS[module]


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


def test_a_library_is_known_in_one_place() -> None:
    places = LIBRARIES | EXTRAS
    for module in MODULES:
        for library in imports(module)[1] & places.keys():
            doors = tuple(f"{place}." for place in places[library])
            assert f"{module}.".startswith(doors), (module, library)


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
        for node in nodes(module):
            if isinstance(node, ast.Name):
                assert node.id not in {"print", "__import__"}, module
            # The streams of other processes are theirs, and the server is a program of its own.
            if isinstance(node, ast.Attribute) and module != "running.serving.server":
                is_ours = isinstance(node.value, ast.Name) and node.value.id == "sys"
                assert not (is_ours and node.attr in {"stdout", "stderr"}), module


def test_text_goes_to_the_streams_through_one_door() -> None:
    """Which makes it safe for terminals. Raw bytes of files, which `.buffer` takes, are no text."""
    for module in MODULES:
        if not module.startswith("cli.") or module == "cli.shared.terminal":
            continue
        for node in nodes(module):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in {
                    *("print", "click.echo", "click.secho", "sys.stdout.write", "os.write"),
                    *("sys.stdout.writelines", "sys.stderr.writelines", "sys.stderr.write"),
                }, module


def test_importing_the_reading_side_loads_nothing_that_only_packing_needs() -> None:
    code = "import sys; from moepack import Pack, Reader, MoepackError; print(*sys.modules)"
    loaded = set(run_child(code).split())
    ours = {name.partition(".")[2] for name in loaded if name.startswith("moepack.")}
    rooms = {name.rpartition(".")[0] for name in ours & {*MODULES}}
    assert rooms == {"common", "pack.format", "pack.reading", "storage"}
    what_reads = {"threaded", "probe", "open_files"}
    assert not {f"storage.{name}" for name in what_reads} & ours  # it comes with the first reader
    assert not loaded & (LIBRARIES.keys() - {"xxhash"})
    assert not loaded & {"tomllib", "dataclasses", "asyncio"}
    assert not loaded & {"ctypes", "inspect", "logging", "multiprocessing", "subprocess"}


def test_a_public_name_is_loaded_with_its_first_use() -> None:
    code = (
        "import sys, moepack\n"
        "print(*[name for name in sys.modules if name.startswith('moepack.')])\n"
        "print(all(hasattr(moepack, name) for name in moepack.__all__), hasattr(moepack, 'x'))\n"
        "print(moepack.Pack.__name__, moepack.open.__name__)\n"
    )
    assert run_child(code) == "\nTrue False\nPack open\n"


def test_tests_have_the_rooms_of_the_package_and_share_by_support_alone() -> None:
    tests = PACKAGE.parent / "tests"
    beside = {"support", "faults", "hostile", "c_header", "native", "examples", "packaging"}
    for path in tests.rglob("test_*.py"):
        folder = ".".join(path.parent.relative_to(tests).parts)
        assert not folder or folder in beside or f"{folder}.__init__" in MODULES, path
        assert not re.search(r"^\s*from tests(?!\.support)", path.read_text(), re.M), path


def test_modules_are_read_in_one_sitting() -> None:
    for module in MODULES:
        text = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        assert text.count("\n") <= 400, module
        for node in nodes(module):
            if isinstance(node, ast.FunctionDef):
                body = (node.end_lineno or 0) - (node.body[0].end_lineno or 0)
                assert body < 50, (module, node.name)
