"""The figures of a running server: its model, its requests, and its cache of experts."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from http import HTTPStatus
from typing import Any

from moepack.common.escaping import one_line
from moepack.running.serving.exchange import Exchange, TextFigures
from moepack.running.serving.served_model import ServedModel
from moepack.running.serving.server_log import RequestFacts
from moepack.running.streaming.control import CacheStatistics
from moepack.version import __version__

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
"""Of the text format of Prometheus."""
_LEFT = "left"
"""In place of a status: the client has left before its answer."""
_Values = float | Iterable[tuple[Mapping[str, str], float]]
"""One value of a metric, or values by labels."""


class Watch:
    """Counts requests; `log` is called with each that has ended.

    `cache` returns what the cache of experts has counted; None if there is none.
    """

    def __init__(
        self,
        log: Callable[[RequestFacts], None],
        cache: Callable[[], CacheStatistics | None] = lambda: None,
        model: ServedModel | None = None,
    ) -> None:
        self.cache, self.model = cache, model
        self._log = log
        self._began = time.time()
        self._by_status: Counter[str] = Counter()
        self._waited_seconds = 0.0
        self._sums = {field.name: 0.0 for field in fields(TextFigures)}
        self._open: set[Exchange] = set()
        self._last_rate: float | None = None

    @contextlib.contextmanager
    def exchange(self) -> Iterator[Exchange]:
        """Yield a request that may come; count it when the block ends, if it came."""
        exchange = Exchange()
        self._open.add(exchange)
        try:
            yield exchange
        except Exception as error:
            if not isinstance(error, OSError):  # ours, not a client's that has left
                exchange.status = exchange.status or HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            self._open.remove(exchange)
            if exchange.method or exchange.status is not None:
                self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        exchange.has_left = exchange.has_left or exchange.status is None
        text = exchange.text_figures
        self._by_status[_LEFT if exchange.has_left else str(exchange.status)] += 1
        self._waited_seconds += exchange.waited_seconds or 0.0
        for name, value in asdict(text).items():
            self._sums[name] += value or 0
        self._last_rate = text.answer_rate or self._last_rate
        self._log(RequestFacts.of(exchange, text, exchange.hit_rate(self.cache())))

    def figures(self) -> dict[str, Any]:
        """Return the figures for `moepack ps`, as JSON has them."""
        cache = self.cache()
        lookups = 0 if cache is None else cache.hit_count + cache.miss_count
        return {
            **(self.model or ServedModel())._asdict(),
            "began": self._began,
            "requests": self._by_status.total(),
            "open_requests": self._open_count(),
            "tokens": int(self._sums["token_count"]),
            "tokens_per_second": self._last_rate,
            "hit_rate": cache.hit_count / lookups if cache is not None and lookups else None,
            "resident_length": None if cache is None else cache.slots_length,
            "budget": None if cache is None else cache.memory,
        }

    def _open_count(self) -> int:
        return sum(bool(exchange.method) for exchange in self._open)

    def metrics(self) -> str:
        """Return all figures in the text format of Prometheus."""
        model = self.model or ServedModel()
        info = {
            "version": __version__,
            "model": model.name,
            "quantisation": model.quantisation or "",
        }
        metrics = [
            _gauge("moepack_model_info", "The model that is served.", [(info, 1)]),
            _gauge("process_start_time_seconds", "Start, in Unix time.", self._began),
            *self._request_metrics(),
        ]
        if (cache := self.cache()) is not None:
            metrics += _cache_metrics(cache)
        return "".join(metrics)

    def _request_metrics(self) -> list[str]:
        sums = self._sums
        statuses = [({"status": status}, count) for status, count in self._by_status.items()]
        waiting = sum(exchange.is_waiting for exchange in self._open)
        return [
            _counter("requests", "Requests that have ended, by status.", statuses),
            _gauge("moepack_requests_open", "Requests that are open.", self._open_count()),
            _gauge("moepack_requests_waiting", "Texts that wait for a turn.", waiting),
            _counter("requests_waited_seconds", "Waiting for a turn.", self._waited_seconds),
            _counter("prompt_tokens", "Tokens of prompts.", sums["prompt_count"]),
            _counter("prompt_tokens_kept", "Kept tokens of earlier texts.", sums["kept_count"]),
            _counter("prompt_seconds", "Computing of prompts.", sums["prompt_seconds"]),
            _counter("answer_tokens", "Tokens of answers.", sums["token_count"]),
            _counter("answer_seconds", "Computing of answers.", sums["answer_seconds"]),
        ]


def _cache_metrics(cache: CacheStatistics) -> list[str]:
    lookups = "Lookups of experts that were in memory; not counted while all are."
    return [
        _counter("experts_hits", lookups, cache.hit_count),
        _counter("experts_misses", "Lookups of experts that were not there.", cache.miss_count),
        _counter("experts_evictions", "Experts taken out of the cache.", cache.evicted_count),
        _counter("experts_faults", "Uses that no router announced.", cache.fault_count),
        _counter("experts_read_bytes", "Bytes of experts that were read.", cache.read_length),
        _counter("experts_rechecked", "Later reads that were compared.", cache.rechecked_count),
        _counter("experts_wait_seconds", "Waiting for reads.", cache.wait_nanoseconds / 1e9),
        _counter("prefetches", "Experts read for the next layer.", cache.ahead_count),
        _counter("prefetches_used", "Prefetched experts that were used.", cache.ahead_right_count),
        _counter("prefetches_wasted_bytes", "Bytes read ahead in vain.", cache.wasted_length),
        _gauge("moepack_experts_budget_bytes", "Memory for experts.", cache.memory),
        _gauge("moepack_experts_resident_bytes", "Memory with experts.", cache.slots_length),
        _gauge("moepack_experts_all_resident", "Whether all experts stay.", cache.holds_all),
    ]


def _counter(name: str, help: str, values: _Values) -> str:
    return _metric(f"moepack_{name}_total", "counter", help, values)


def _gauge(name: str, help: str, values: _Values) -> str:
    return _metric(name, "gauge", help, values)


def _metric(name: str, kind: str, help: str, values: _Values) -> str:
    """Return the lines of a metric."""
    lines = [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
    for labels, value in [({}, values)] if isinstance(values, int | float) else values:
        number = int(value) if value == int(value) else value
        pairs = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{pairs}}} {number!r}" if pairs else f"{name} {number!r}")
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str) -> str:
    return one_line(text).replace("\\", "\\\\").replace('"', '\\"')
