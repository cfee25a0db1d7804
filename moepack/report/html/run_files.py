"""Files of measurements: the JSON of `bench`, `bench --run` and `run`, and of llama-bench."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moepack.bench.engine_speed import EngineSpeed
from moepack.bench.run import BenchReport
from moepack.common.errors import RequestError
from moepack.planning.forecasting.measured_runs import ReceiptFile, read_runs
from moepack.report.html.facts import RunFile
from moepack.running.programs.run_facts import RunFacts

_KINDS: Mapping[type, tuple[str, ...]] = {
    BenchReport: ("surface", "readings", "verdict"),
    EngineSpeed: ("sides", "memory_limit"),
    RunFacts: ("prompt", "memory", "read_length"),
}
"""The kinds of facts that moepack writes, and fields by which each is told from the others."""


def run_file_of(file: ReceiptFile) -> RunFile:
    """Return the measurements in a file. Raises RequestError for any other file."""
    name = os.path.basename(file.path)
    try:
        value = json.loads(file.data)
    except (ValueError, RecursionError):
        value = None  # llama-bench writes several objects, too
    for kind, names in _KINDS.items():
        if isinstance(value, dict) and value.keys() >= set(names):
            facts = _Reader(file.path).read(kind, value, "")
            if isinstance(facts, RunFacts):  # nobody posts what was asked and answered
                facts = replace(facts, text="", thoughts="")
            return RunFile(name, facts)
    return RunFile(name, tuple(read_runs([file])))


class _Reader:
    """Reads JSON as facts, by the types of their fields; other fields are left out."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, kind: Any, value: Any, place: str) -> Any:
        """Return a value as one of a kind. Raises RequestError, which names the place in it."""
        origin = get_origin(kind)
        if origin in (Union, types.UnionType):
            kinds = [one for one in get_args(kind) if one is not types.NoneType]
            optional = len(kinds) < len(get_args(kind))
            return None if value is None and optional else self.read(kinds[0], value, place)
        if origin is Literal:
            return self._checked(value in get_args(kind), value, place, "one of its words")
        if origin is tuple:
            self._checked(isinstance(value, list), value, place, "a list")
            inner = get_args(kind)[0]
            places = (f"{place}[{number}]" for number in range(len(value)))
            return tuple(map(self.read, [inner] * len(value), value, places))
        if is_dataclass(kind):
            return self._record(kind, [field.name for field in fields(kind)], value, place)
        if hasattr(kind, "_fields"):
            return self._record(kind, kind._fields, value, place)
        return self._plain(kind, value, place)

    def _record(self, kind: Any, names: Any, value: Any, place: str) -> Any:
        self._checked(isinstance(value, dict), value, place, "an object")
        hints = get_type_hints(kind)
        prefix = f"{place}." if place else ""
        values = {
            name: self.read(hints[name], value.get(name), prefix + name)
            for name in names
            if name in value or name not in getattr(kind, "_field_defaults", {})
        }
        return kind(**values)

    def _plain(self, kind: Any, value: Any, place: str) -> Any:
        if kind is float and type(value) is int and abs(value) < 1 << 63:
            value = float(value)
        is_right = type(value) is kind and (kind is not int or abs(value) < 1 << 63)
        return self._checked(is_right, value, place, f"{kind.__name__}")

    def _checked(self, is_right: bool, value: Any, place: str, expected: str) -> Any:
        if not is_right:
            shown = json.dumps(value)[:40]
            problem = "not as moepack writes it"
            raise RequestError(
                problem, path=self._path, place=place, expected=expected, found=shown
            )
        return value
