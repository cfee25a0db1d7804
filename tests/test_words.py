"""The language of the package: names are nouns, sentences begin with a verb or a noun.

Each pattern is one that made readers stop. It is counted in docstrings, help texts and names, and
stays at zero.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "moepack"
MODULES = sorted(PACKAGE.rglob("*.py"))

FIRST_LINES = {
    "a clause in place of a noun": re.compile(
        r"^(What|Whatever|Whom?|That which|Those (that|which|who))\b"
        r"|\b(and|or|with|of|for|by|than|from) (what|that which|whom)\b"
        r"|\bwhat is \w+ of\b",
    ),
    "an order to speak in place of the result": re.compile(
        r"^(Say|Tell|Answer)s? (whether|if|how|what|which|where|who)\b"
    ),
    "a wish": re.compile(r"^(Have|Let|Make sure that) \w+"),
}
"""Patterns that the first line of a docstring, and a help text, do without."""

TEXTS = {
    "where for a condition": re.compile(
        r"\b(None|[Ff]alse|[Tt]rue|0|zero|empty|Raises [\w ,]+?) where\b"
        r"|\bwhere (there (is|are|was)|it (is|was|has|can|does|lacks)|they (are|have)|none|nothing"
        r"|nobody|no)\b"
    ),
}
"""Patterns that all of a docstring, and a help text, do without."""

STATES = {
    *("found", "held", "known", "asked", "stated", "seen", "given", "met", "heard", "taken"),
    *("wanted", "chose", "told", "got"),
}
"""Participles: a variable is named by its noun."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """List all of a module, as Python understands it."""
    return list(ast.walk(ast.parse(path.read_text())))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, those of attributes included."""
    for node in nodes(path):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


def help_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each help of an option."""
    for node in nodes(path):
        if isinstance(node, ast.keyword) and node.arg in ("help", "short_help"):
            words = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            yield node.value.lineno, "".join(word for word in words if isinstance(word, str))


def faults(path: Path) -> Iterator[str]:
    """Yield the faults of a module, each with its line."""
    name = "/".join(path.parts[-3:])
    texts = [*docstrings(path), *help_texts(path)]
    for line, text in texts:
        first = text.partition("\n")[0]
        for fault, pattern in FIRST_LINES.items():
            if pattern.search(first):
                yield f"{name}:{line}: {fault}: {first}"
        for fault, pattern in TEXTS.items():
            if match := pattern.search(" ".join(text.split())):
                yield f"{name}:{line}: {fault}: {match[0]}"
    for node in nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in STATES:
            yield f"{name}:{node.lineno}: a variable named by its state: {node.id}"
        # `found` is what messages of errors say.
        if isinstance(node, ast.arg) and node.arg in STATES and path.name != "errors.py":
            yield f"{name}:{node.lineno}: a parameter named by its state: {node.arg}"
        if isinstance(node, ast.Call) and any(
            isinstance(one, ast.Starred) and isinstance(one.value, ast.Tuple | ast.List)
            for one in node.args
        ):
            yield f"{name}:{node.lineno}: a literal unpacked into arguments"


def test_the_package_reads_without_a_stop() -> None:
    assert not [fault for path in MODULES for fault in faults(path)]


def test_a_class_name_stands_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: several for name, several in places.items() if len(several) > 1}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"""What a cache holds."""', "a clause"),
        ('"""Return the length of what was read."""', "a clause"),
        ('"""Say whether it is open."""', "an order"),
        ('"""Have a page read."""', "a wish"),
        ('"""Return it.\\n\\n    None where there is no file."""', "where"),
        ("option(help='Leave it out where it is slow.')", "where"),
        ("found = 1", "a variable"),
        ("def f(known): pass", "a parameter"),
        ("f(*(1, 2), 3)", "a literal"),
    ],
)
def test_each_pattern_is_seen(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_words.PACKAGE", tmp_path / "package")
    path = tmp_path / "module.py"
    path.write_text(f"{text}\n")
    (seen,) = faults(path)
    assert f": {fault}" in seen
