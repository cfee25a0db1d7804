"""Mutants of moepack's Python: each has a small mistake, and a test must fail because of it.

`python -m tests.mutants.python 60 moepack/pack/format/index.py` tries 60 of that file, each by one
run of the tests in TESTS. Formatted texts, annotations, decorators and assertions stay as they are.

Some survive by right: None for False, the only field of a struct, what closes a file that nobody
holds, `strict` where lengths are equal, numbers of threads and of names in a message, races that
lose nothing, and bounds of a check after which another one refuses the same.
"""

import ast
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.mutants.c_mutations import Mutant
from tests.mutants.native import PYTEST, SURVIVED, TREE, copy_project, fails

SWAPS: dict[type[ast.AST], tuple[Any, ...]] = {
    **{ast.Lt: (ast.LtE, ast.GtE), ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,)},
    **{ast.Gt: (ast.GtE, ast.LtE), ast.LtE: (ast.Lt, ast.Gt), ast.NotEq: (ast.Eq,)},
    **{ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)},
    **{ast.And: (ast.Or,), ast.Or: (ast.And,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,)},
    **{ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Add,), ast.Mod: (ast.Mult,)},
}
TESTS = {
    "moepack/pack/format": "pack/verifying/test_rules.py pack/format test_conformance_packs.py"
    " test_format_document.py c_header/test_rules.py hostile/test_pack.py packing/test_restore.py",
    "moepack/pack/verifying": "pack/verifying packing/test_restore.py packing/test_shared_pack.py"
    " pack/engines/test_exports.py",
    "moepack/packing": "packing/test_restore.py packing/in_place/test_in_place.py"
    " packing/test_shard_index.py packing/test_shared_pack.py",
    "moepack/packing/writing": "packing/writing packing/test_pack_model.py hostile/test_records.py"
    " packing/test_ranking.py packing/test_remote_source.py packing/test_shared_pack.py"
    " faults/test_nothing_is_lost.py",
}
"""By folder, the tests that guard its files, the quickest first."""


def mutants_of(source: bytes) -> list[Mutant]:
    """Return all mutants of a module, in the order of their places, which are bytes."""
    mutants, lines = set(), source.splitlines(keepends=True)
    starts = list(accumulate(map(len, lines), initial=0))
    for node in _running(ast.parse(source)):
        for place, changed in (*_with_other_operators(node), *_changes(node)):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            text = changed if isinstance(changed, str) else f"({ast.unparse(changed)})"
            mutants.add(Mutant(start, end, text))
    return sorted(mutants)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one that may change."""
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Assert):
                    yield child
                    yield from _running(child)


def _with_other_operators(node: Any) -> Iterator[tuple[Any, ast.expr]]:
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            for other in SWAPS[type(operator)]:
                operators = [*node.ops[:number], other(), *node.ops[number + 1 :]]
                yield node, ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(SWAPS[type(node.op)][0](), node.values)
    elif isinstance(node, ast.BinOp) and (others := SWAPS.get(type(node.op))):
        yield node, ast.BinOp(node.left, others[0](), node.right)


def _changes(node: Any) -> Iterator[tuple[Any, ast.expr | str]]:
    """Yield the nodes that are replaced, and by what."""
    match node:
        case ast.UnaryOp(op=ast.Not()):
            yield node, node.operand
        case ast.Constant(value=bool()):
            yield node, ast.Constant(not node.value)
        case ast.Constant(value=int() as value):
            yield from ((node, ast.Constant(value + step)) for step in (1, -1))
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.Return(value=ast.AST()) if ast.unparse(node) != "return None":
            yield node, "return None"
        case ast.ExceptHandler():
            yield node.type, "()"  # it catches nothing
        case ast.Expr(value=ast.Call() | ast.Yield()) | ast.AugAssign() | ast.Raise():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Continue() | ast.Break():
            yield node, "pass"


def try_file(name: str, most: int) -> None:
    """Try mutants of a file, always the same."""
    path = TREE / name
    command = [*PYTEST, *(f"tests/{one}" for one in TESTS[str(Path(name).parent)].split())]
    assert not fails(command, TREE, 300), "they fail without a mutant"
    source, counts = path.read_bytes(), Counter[str]()
    mutants = mutants_of(source)
    random.Random(1).shuffle(mutants)
    for mutant in mutants[:most]:
        path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        verdict = "killed" if fails(command, TREE, 300) else SURVIVED
        counts[verdict] += 1
        line = source.count(b"\n", 0, mutant.start) + 1
        before = " ".join(source[mutant.start : mutant.end].decode().split())
        print(f"{name}:{line}: {before} → {mutant.text}: {verdict}", flush=True)
    path.write_bytes(source)
    print(f"{name}: {dict(counts)} of {len(mutants)}", flush=True)


def main() -> None:
    copy_project()
    for name in sys.argv[2:]:
        try_file(name, int(sys.argv[1]))


if __name__ == "__main__":
    main()
