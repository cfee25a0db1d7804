"""Forecasts of one model on several machines, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moepack.common.errors import RequestError
from moepack.pack.opening.open_model import Model
from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting.facts import ForecastFacts
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.machine.described import AnyMachine, find_machine


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine by its name, and the forecast for it; `refusal` says why there is none."""

    machine: str
    forecast: ForecastFacts | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class ComparisonFacts:
    """A model on several machines, in the order in which they were named."""

    model: str
    machines: tuple[MachineFacts, ...]


def compare_machines(
    model: Model, machines: Sequence[AnyMachine], **options: Any
) -> ComparisonFacts:
    """Forecast a model on several machines; `options` are those of `forecast`.

    A machine on which it does not run, or not in the requested mode, has a refusal. Raises what
    `forecast` raises if it runs on none, or for the model and the traces.
    """
    footprint = footprint_of(model)
    facts: list[MachineFacts] = []
    errors: list[RequestError] = []
    for number, one in enumerate(map(find_machine, machines), 1):
        name = one.name or f"machine {number}"
        try:
            facts.append(MachineFacts(name, forecast(footprint, one, **options)))
        except RequestError as error:
            errors.append(error)
            facts.append(MachineFacts(name, None, str(error)))
    if len(errors) == len(facts):
        raise errors[0]
    return ComparisonFacts(footprint.path, tuple(facts))
