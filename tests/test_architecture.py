"""Who may import whom: data moves one way, and the reading side stands alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "moepack"

# Each module and the modules of moepack that it may know. What is not in a row is forbidden.
MAY_IMPORT: dict[str, set[str]] = {
    # Both sides
    "errors": set(),
    "digest": set(),
    "records": set(),
    # The reading side
    "index": {"errors", "digest", "records"},
    "manifest": {"errors", "digest", "records", "index"},
    "backends": set(),
    "buffers": {"errors"},
    "files": set(),
    "rounding": {"backends", "buffers", "files"},
    "threads": {"backends", "files", "rounding"},
    "ring": set(),
    "uring": {"backends", "files", "ring", "rounding"},
    "choice": {"errors", "backends", "buffers", "threads", "uring"},
    "in_flight": {"errors"},
    "wanted": {"errors", "digest", "backends", "pack"},  # pack: for its types only
    "schedule": {"errors", "backends", "in_flight", "wanted"},
    "batch": {"errors", "buffers", "pack", "schedule", "wanted"},  # pack: for its types only
    "reader": {
        *("errors", "backends", "batch", "buffers", "choice", "in_flight", "schedule", "wanted"),
        "pack",  # for its types only
    },
    "pack": {
        *("errors", "digest", "manifest", "index", "backends", "buffers", "in_flight", "reader"),
    },
    "aio": {
        *("errors", "backends", "batch", "in_flight", "reader", "schedule"),
        "pack",  # for its types only
    },
    "__init__": {"errors", "batch", "buffers", "in_flight", "pack", "reader"},
    # From shards to a plan
    "ggml_types": set(),
    "sniff": set(),
    "tensor_table": {"errors", "ggml_types", "sniff"},
    "gguf_header": {"errors", "sniff", "tensor_table"},
    "source": {"errors", "gguf_header", "tensor_table"},
    "experts": {"errors", "ggml_types", "source", "tensor_table"},
    "layout": {"errors", "records", "index"},
    "hotness": {"errors", "digest", "experts"},
    "plan": {"errors", "records", "experts", "layout"},
    # From files of any format to a trace
    "trace": set(),
    "checks": {"errors", "trace"},
    "compressed": {"errors"},
    "assembly": {"errors", "trace"},
    "trace_text": {"errors", "compressed", "trace"},
    "text_formats": {"checks", "compressed", "trace", "trace_text"},
    "list_format": {"assembly", "checks", "text_formats", "trace", "trace_text"},
    "log_formats": {
        *("assembly", "checks", "list_format", "text_formats", "trace", "trace_text"),
    },
    "table_formats": {"checks", "list_format", "text_formats", "trace", "trace_text"},
    "json_formats": {"list_format", "text_formats", "trace", "trace_text"},
    "binary_formats": {"errors", "assembly", "checks", "compressed", "trace"},
    "array_formats": {"errors", "checks", "compressed", "trace"},
    "trace_records": {"trace"},
    "trace_file": {"errors", "digest", "checks", "compressed", "trace", "trace_records"},
    "trace_formats": {
        *("errors", "array_formats", "binary_formats", "checks", "compressed", "json_formats"),
        *("log_formats", "table_formats", "text_formats", "trace", "trace_file"),
    },
    "imatrix": {"errors", "checks", "gguf_header", "tensor_table", "trace"},
    "llama_library": {"errors"},
    "prompts": {"errors", "compressed"},
    "recording": {
        *("errors", "experts", "llama_library", "source", "trace", "trace_file", "trace_records"),
    },
    # From a trace to what it says
    "tally": {"trace"},
    "coverage": {"hotness"},
    "counting": {
        *("errors", "digest", "checks", "compressed", "coverage", "hotness"),
        *("imatrix", "plan", "tally", "trace", "trace_formats"),
    },
    "working_set": {"trace"},
    "reuse": {"trace"},
    "latest_caches": {"trace"},
    "concentration": {"latest_caches", "tally", "trace"},
    # From a plan to a pack
    "index_writer": {"digest", "ggml_types", "records", "experts", "plan"},
    "journal": {"errors", "digest"},
    "copying": {"errors", "digest", "gguf_header", "experts", "journal", "plan", "source"},
    "packer": {
        *("errors", "gguf_header", "manifest", "pack", "index_writer", "journal"),
        *("copying", "hotness", "plan", "source", "__init__"),
    },
    # Verification: the index decoder, and nothing of the packer's
    "witness": {"errors"},
    "findings": set(),
    "scan": {"errors", "digest", "findings"},
    "verify": {
        *("errors", "digest", "records", "index", "manifest", "pack"),
        *("findings", "scan", "witness"),
    },
    # The command line's side
    "inspection": {"digest", "coverage", "ggml_types", "experts", "index", "pack", "source"},
    "rendering": {"findings", "pack"},
    # What a pack is worth on this machine: both sides are read
    "timed_reads": {"errors", "backends", "buffers"},
    "page_cache": set(),
    "surface": {"backends", "timed_reads"},
    "routing": {"errors", "checks", "trace", "trace_formats"},
    "comparison": {
        *("errors", "backends", "experts", "pack", "source", "wanted"),
        *("page_cache", "routing", "timed_reads"),
    },
    "bench": {
        *("backends", "comparison", "experts", "pack", "routing", "source", "surface"),
        "timed_reads",
    },
    "bench_text": {"rendering"},
    "chart": {"errors"},
    "header_file": {"errors"},
    "terminal": {"errors"},
    "trace_report": {"rendering"},
    "cli_bench": {"*"},
    "cli_trace": {"*"},
    "cli": {"*"},
    "__main__": {"cli"},
}

COMMAND_LINE = {"cli", "cli_bench", "cli_trace", "terminal"}
COMMAND_LINE_ONLY = {"click", "tqdm"}


def imports(module: str) -> tuple[set[str], set[str]]:
    """Give the modules of moepack, and the others, that a module imports anywhere in its text."""
    ours: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "moepack":
            known = {alias.name for alias in node.names}
            ours |= {name if name in MAY_IMPORT else "__init__" for name in known}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moepack."):
            ours.add((node.module or "").partition(".")[2])
        elif isinstance(node, ast.ImportFrom):
            others.add((node.module or "").partition(".")[0])
    return ours, others


def test_the_table_names_every_module() -> None:
    assert set(MAY_IMPORT) == {path.stem for path in PACKAGE.glob("*.py")}


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_module_knows_only_what_comes_before_it(module: str) -> None:
    ours, others = imports(module)
    allowed = MAY_IMPORT[module]
    assert ours <= allowed or "*" in allowed
    assert ours >= allowed - {"*"}, "the table allows what nobody needs"
    if module not in COMMAND_LINE:
        assert not others & COMMAND_LINE_ONLY


@pytest.mark.parametrize("module", set(MAY_IMPORT) - COMMAND_LINE)
def test_the_library_never_prints(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


def test_importing_the_reading_side_loads_nothing_that_only_packing_needs() -> None:
    code = "import sys, moepack; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    reading = {
        *("errors", "digest", "records", "index", "manifest", "pack", "wanted", "reader", "batch"),
        *("schedule", "in_flight", "buffers", "backends"),  # what reads comes with the first reader
    }
    ours = {name.partition(".")[2] for name in loaded if name.startswith("moepack.")}
    assert ours == reading
    assert not loaded & {"numpy", "gguf", "click", "tqdm", "tomllib", "dataclasses", "asyncio"}


def test_modules_are_read_in_one_sitting() -> None:
    for path in PACKAGE.glob("*.py"):
        assert path.read_text().count("\n") <= 400, path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 50, f"{path.name}: {node.name}"
