"""Facts become JSON by one rule for each kind of value."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest

from moepack.report.facts import json_text, to_json


class Word(Enum):
    """An enumeration that is no text by itself."""

    GAIN = "gain"


class Number(IntEnum):
    """An enumeration that is a number as well."""

    TWO = 2


class Pair(NamedTuple):
    """A named tuple."""

    first: int
    second: "tuple[Pair, ...]"


@dataclass(frozen=True, slots=True)
class Facts:
    """A dataclass whose fields are not in the order of the alphabet."""

    z: object
    a: object = None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(1), {"z": 1, "a": None}),
        (Facts(Facts(True)), {"z": {"z": True, "a": None}, "a": None}),
        (Pair(1, (Pair(2, ()),)), {"first": 1, "second": [{"first": 2, "second": []}]}),
        ((1, 2.5, "text"), [1, 2.5, "text"]),
        (Path("folder/file"), "folder/file"),
        ([Word.GAIN, Number.TWO], ["gain", 2]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (Counter({"problem": 3}), {"problem": 3}),
        ((math.inf, -math.inf, math.nan), [None, None, None]),
    ],
)
def test_each_kind_of_value_has_its_form(facts: object, expected: object) -> None:
    assert to_json(facts) == expected
    assert json.loads(json_text(facts)) == expected


def test_fields_keep_their_order() -> None:
    assert json_text(Facts(1, 2)) == '{\n  "z": 1,\n  "a": 2\n}'


@pytest.mark.parametrize("value", [object(), b"bytes", Facts(1j), Facts])
def test_what_json_lacks_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="JSON has no"):
        to_json(value)
