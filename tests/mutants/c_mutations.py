"""Small mistakes in C: what the tests of `native/` must find, by the words of a file alone.

Operators are swapped and shifted, conditions and results negated, integers changed by one, calls
and assignments left out. Some of it does not compile, or changes nothing: the compiler tells.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TOKEN = re.compile(
    r"(?P<skipped>\s+|/\*.*?\*/|//[^\n]*|^[ \t]*#(?:\\\n|[^\n])*)"
    r'|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[0-9][\w.]*|\w+'
    r"|->|\+\+|--|<<|>>|[<>=!]=|&&|\|\||[-+*/%&|^]=|.",
    re.DOTALL | re.MULTILINE,
)
SWAPS = {
    **{"<": ("<=", ">="), ">": (">=", "<="), "<=": ("<", ">"), ">=": (">", "<")},
    **{"==": ("!=",), "!=": ("==",), "&&": ("||",), "||": ("&&",), "!": ("",)},
    **{"+": ("-",), "-": ("+",), "+=": ("-=",), "-=": ("+=",), "++": ("--",), "--": ("++",)},
}
INTEGER = re.compile(r"(0|[1-9][0-9]*)(u?l{0,2})")
OPERAND = re.compile(r"[\w)\]]")
LVALUE = re.compile(r"\*?\(?\*?\w+\)?( ?(->|\.) ?\w+| ?\[.*?\])*")
ASSIGNMENT = re.compile(
    rf"({LVALUE.pattern} ([-+*/|&]?=) .*|{LVALUE.pattern} (\+\+|--)|(\+\+|--) .*)"
)
CALL = re.compile(r"\w+( (->|\.) \w+)* \(.*\)")


class Token(NamedTuple):
    """A word of C, and where it is in its file."""

    start: int
    text: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class Mutant(NamedTuple):
    """A change of a file: what replaces the text from `start` to `end`."""

    start: int
    end: int
    text: str


def mutants_of(text: str) -> list[Mutant]:
    """Return all mutants of a C file, in the order of their places."""
    found = TOKEN.finditer(text)
    tokens = [Token(one.start(), one[0]) for one in found if one["skipped"] is None]
    mutants = [*_of_tokens(tokens), *_of_conditions(text, tokens), *_of_statements(text, tokens)]
    return sorted(set(mutants))


def _of_tokens(tokens: Sequence[Token]) -> Iterator[Mutant]:
    for before, token in zip([Token(0, ";"), *tokens], tokens, strict=False):
        texts: Sequence[str] = SWAPS.get(token.text, ())
        if token.text in ("+", "-") and not (
            OPERAND.match(before.text[-1]) and before.text != "return"
        ):
            texts = ()
        if number := INTEGER.fullmatch(token.text):
            value = int(number[1])
            texts = [f"{one}{number[2]}" for one in (value + 1, value - 1) if one >= 0]
        for one in texts:
            yield Mutant(token.start, token.end, one)


def _closing(tokens: Sequence[Token], first: int) -> int:
    depth = 0
    for number in range(first, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[number].text, 0)
        if not depth:
            return number
    raise AssertionError("a bracket is not closed")


def _of_conditions(text: str, tokens: Sequence[Token]) -> Iterator[Mutant]:
    for number, token in enumerate(tokens):
        if token.text in ("if", "while"):
            start, end = tokens[number + 1].start, tokens[_closing(tokens, number + 1)].end
            yield Mutant(start, end, f"(!{text[start:end]})")


def _of_statements(text: str, tokens: Sequence[Token]) -> Iterator[Mutant]:
    number = 0
    while number < len(tokens):
        first = tokens[number]
        if first.text in ("if", "while", "for", "switch"):
            number = _closing(tokens, number + 1) + 1
            continue
        ends = {"{", "}", ";", *((":",) if first.text in ("case", "default") else ())}
        end = number
        while first.text != "else" and tokens[end].text not in ends:
            end = _closing(tokens, end) + 1 if tokens[end].text == "(" else end + 1
        statement = " ".join(one.text for one in tokens[number:end])
        start, last = first.start, tokens[end - 1].end
        if tokens[end].text == ";" and first.text == "return" and end > number + 1:
            value = tokens[number + 1].start
            yield Mutant(value, last, "0")
            yield Mutant(value, last, f"!({text[value:last]})")
        elif CALL.fullmatch(statement) or ASSIGNMENT.fullmatch(statement):
            yield Mutant(start, last, "")
        number = end + 1
