"""The figures of a running server: its model, its requests, and its cache of experts."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from moepack.running.serving.exchange import Exchange, TextFigures
from moepack.running.serving.metrics import Metric, metrics_text
from moepack.running.serving.served_model import ServedModel
from moepack.running.serving.server_log import RequestFacts
from moepack.running.streaming.control import CacheStatistics
from moepack.version import __version__

_LEFT = "left"
"""In place of a status: the client has left before its answer."""


@dataclass
class _Totals:
    """Requests that have ended, by status, and the sums of their figures."""

    by_status: Counter[str] = field(default_factory=Counter)
    waited_seconds: float = 0.0
    prompt_count: int = 0
    kept_count: int = 0
    token_count: int = 0
    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0

    def add(self, exchange: Exchange, text: TextFigures) -> None:
        self.by_status[_LEFT if exchange.has_left else str(exchange.status)] += 1
        self.waited_seconds += exchange.waited_seconds or 0.0
        self.prompt_count += text.prompt_count or 0
        self.kept_count += text.kept_count or 0
        self.token_count += text.token_count or 0
        self.prompt_seconds += text.prompt_seconds or 0.0
        self.answer_seconds += text.answer_seconds or 0.0


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
        self._totals = _Totals()
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
        self._totals.add(exchange, text)
        self._last_rate = text.answer_rate or self._last_rate
        self._log(RequestFacts.of(exchange, text, exchange.hit_rate(self.cache())))

    def figures(self) -> dict[str, Any]:
        """Return the figures for `moepack ps`, as JSON has them."""
        cache, totals = self.cache(), self._totals
        lookups = 0 if cache is None else cache.hit_count + cache.miss_count
        return {
            **(self.model or ServedModel())._asdict(),
            "began": self._began,
            "requests": totals.by_status.total(),
            "open_requests": self._open_count(),
            "tokens": totals.token_count,
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
            Metric("moepack_model_info", "gauge", "The model that is served.", [(info, 1)]),
            Metric("process_start_time_seconds", "gauge", "Start, in Unix time.", self._began),
            *self._request_metrics(),
        ]
        if (cache := self.cache()) is not None:
            metrics += _cache_metrics(cache)
        return metrics_text(metrics)

    def _request_metrics(self) -> list[Metric]:
        totals = self._totals
        statuses = [({"status": status}, count) for status, count in totals.by_status.items()]
        waiting = sum(exchange.is_waiting for exchange in self._open)
        return [
            _counter("requests", "Requests that have ended, by status.", statuses),
            Metric("moepack_requests_open", "gauge", "Requests that are open.", self._open_count()),
            Metric("moepack_requests_waiting", "gauge", "Texts that wait for a turn.", waiting),
            _counter("requests_waited_seconds", "Waiting for a turn.", totals.waited_seconds),
            _counter("prompt_tokens", "Tokens of prompts.", totals.prompt_count),
            _counter("prompt_tokens_kept", "Kept tokens of earlier texts.", totals.kept_count),
            _counter("prompt_seconds", "Computing of prompts.", totals.prompt_seconds),
            _counter("answer_tokens", "Tokens of answers.", totals.token_count),
            _counter("answer_seconds", "Computing of answers.", totals.answer_seconds),
        ]


def _counter(name: str, help: str, value: Any) -> Metric:
    return Metric(f"moepack_{name}_total", "counter", help, value)


def _cache_metrics(cache: CacheStatistics) -> list[Metric]:
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
        Metric("moepack_experts_budget_bytes", "gauge", "Memory for experts.", cache.memory),
        Metric(
            "moepack_experts_resident_bytes", "gauge", "Memory with experts.", cache.slots_length
        ),
        Metric(
            "moepack_experts_all_resident", "gauge", "Whether all experts stay.", cache.holds_all
        ),
    ]
