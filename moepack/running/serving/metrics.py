"""Figures in the text format of Prometheus, version 0.0.4."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from moepack.common.escaping import one_line

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """A metric with one value, or with values by labels; `help` is a sentence."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float | Iterable[tuple[Mapping[str, str], float]]


def metrics_text(metrics: Iterable[Metric]) -> str:
    """Return the lines of metrics."""
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric))


def _lines(metric: Metric) -> Iterable[str]:
    yield f"# HELP {metric.name} {metric.help}"
    yield f"# TYPE {metric.name} {metric.kind}"
    values = [({}, metric.value)] if isinstance(metric.value, int | float) else metric.value
    for labels, value in values:
        pairs = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
        yield f"{metric.name}{{{pairs}}} {value!r}" if pairs else f"{metric.name} {value!r}"


def _escape(text: str) -> str:
    return one_line(text).replace("\\", "\\\\").replace('"', '\\"')
