"""Attention by layer, from a model's metadata and the rules of its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from moepack.common.errors import SourceError
from moepack.planning.footprint import rules
from moepack.planning.footprint.rules import Recurrence, StateKind
from moepack.source.experts import mtp_start
from moepack.source.shards import Source

MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS of llama.cpp b11549."""

_WIDTHS = 3
"""Queries, keys and values: alike in most models."""
_INDEXED_COUNT = 2048
"""Tokens that an indexer chooses (DeepSeek-V3.2 and those after it)."""


class LayerAttention(NamedTuple):
    """The elements that a layer keeps of each token: keys, values, and an indexer's.

    With `has_window` it keeps them for the tokens of a window only. `state_count` is the elements
    of a state for any number of tokens; a layer may have either or both. `compression` is how many
    tokens one more row of keys stands for, 0 for none.
    """

    layer: int
    key_count: int = 0
    value_count: int = 0
    has_window: bool = False
    index_key_count: int = 0
    index_value_count: int = 0
    state_count: int = 0
    compression: int = 0


class Attention(NamedTuple):
    """The attention of all layers; `window` in tokens, 0 for none.

    The model was trained for `context_length` tokens, None if that is not stated.
    `largest_value_count` is of any layer:
    without flash attention each layer's values take as much. With `is_compressed` layers may keep
    rows that stand for several tokens, beside those in the window (deepseek4). `allows_flash` is
    flash attention. `head_count` is the most of any layer, `width` the elements of a token's
    queries, keys and values.
    """

    layers: tuple[LayerAttention, ...]
    window: int
    context_length: int | None
    largest_value_count: int
    is_compressed: bool
    allows_flash: bool
    head_count: int
    width: int

    @property
    def has_indexer(self) -> bool:
        """Whether any layer chooses the tokens that it attends to."""
        return any(layer.index_key_count for layer in self.layers)

    def operations(self, count: int) -> float:
        """Return about how many operations the tokens of a prompt take to attend to each other.

        Four for each element of a query, and each token that it looks at: half of the prompt, or as
        many as a window, or an indexer's usual choice, has.
        """
        total = 0.0
        for layer in self.layers:
            if layer.key_count:
                most = self.window if layer.has_window else count
                most = min(most, _INDEXED_COUNT) if layer.index_key_count else most
                total += 4 * self.width / _WIDTHS * min(count / 2, most) * count
        return total


def attention_of(source: Source) -> Attention:
    """Return the attention of a model, as llama.cpp b11549 runs it.

    Raises SourceError for incomplete metadata.
    """
    return _MetadataReader(source).read()


def states_attention(source: Source) -> bool:
    """Return whether the metadata describes attention, or states in its place."""
    state = rules.STATES.get(source.architecture)
    return source.model_value("attention.head_count") is not None or (
        state is not None and state.layers is Recurrence.ALL
    )


class _MetadataReader:
    """Reads metadata by the rules of one architecture; `count` is of all blocks."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.architecture = source.architecture
        self.count = self.number("block_count", None)
        if not 0 < self.count <= MAX_LAYERS:
            raise self.error("block_count", f"1 to {MAX_LAYERS}", self.count)
        self.run_count = mtp_start(source) or self.count
        if not states_attention(source):
            raise self.error("attention.head_count", "a number", None)
        none = [0] * self.count
        self.heads = self.by_layer("attention.head_count") or none
        self.kv_heads = self.by_layer("attention.head_count_kv") or self.heads
        self.dense_widths = self.by_layer("feed_forward_length") or none
        self.compressions = self.by_layer("attention.compress_ratios") or none
        self.is_compressed = self.architecture == "deepseek4"
        self.window = 0
        self.windowed = self.find_windows()
        self.recurrent = self.find_recurrent()

    def read(self) -> Attention:
        is_mla = bool(self.length("key_length_mla") and self.length("value_length_mla"))
        is_mla |= self.is_compressed
        keeps = self.architecture not in rules.NO_CACHE
        layers = [self.layer(number, is_mla) for number in range(self.count)] if keeps else []
        context_length = self.source.model_value("context_length")
        key_length = max(self.head_length("key", number) for number in range(self.count))
        query_length = self.length("key_length_mla") or key_length
        return Attention(
            layers=tuple(layers),
            window=self.window,
            context_length=context_length if _is_count(context_length) else None,
            largest_value_count=max(map(self.value_count, range(self.count))),
            is_compressed=self.is_compressed,
            allows_flash=self.architecture not in rules.NO_FLASH_ATTENTION,
            head_count=max(self.heads),
            width=max(self.heads) * (query_length + 2 * key_length),
        )

    def layer(self, number: int, is_mla: bool) -> LayerAttention:
        layer = LayerAttention(number, has_window=self.windowed[number])
        if number < self.run_count:
            layer = layer._replace(state_count=self.state_count(number))
        if not self.has_keys(number):
            return layer
        index_key_count = self.index_key_count(number)
        has_values = self.architecture in rules.INDEXED_WITH_VALUES and index_key_count
        return layer._replace(
            key_count=self.kv_heads[number] * self.head_length("key", number),
            value_count=0 if is_mla else self.value_count(number),
            index_key_count=index_key_count,
            index_value_count=self.head_length("value", 0) if has_values else 0,
            compression=self.compressions[number] if self.is_compressed else 0,
        )

    def has_keys(self, number: int) -> bool:
        if number >= self.run_count and self.architecture not in rules.MTP_IS_CACHED:
            return False
        if self.architecture == "gemma4":
            return number < self.count - self.length("shared_kv_layers")
        if number >= rules.KV_LAYERS.get(self.architecture, self.count):
            return False
        state = rules.STATES.get(self.architecture)
        if state is None or state.layers is Recurrence.BESIDE_ATTENTION:
            return True
        if state.layers is Recurrence.NEITHER and self.dense_widths[number]:
            return False
        return not self.recurrent[number]

    def value_count(self, number: int) -> int:
        return self.kv_heads[number] * self.head_length("value", number)

    def head_length(self, name: str, number: int) -> int:
        """Return the elements of a key or a value of one head (llama-model.cpp, `load_hparams`)."""
        if not self.heads[0]:
            return 0
        full = self.number(f"attention.{name}_length", self.embedding_length // self.heads[0])
        if not self.windowed[number]:
            return full
        return self.number(f"attention.{name}_length_swa", full)

    @property
    def embedding_length(self) -> int:
        return self.number("embedding_length", None)

    def find_windows(self) -> list[bool]:
        rule = rules.WINDOWS.get(self.architecture)
        if rule is None:
            return [False] * self.count
        window = self.length("sliding_window", rule.default or 0)
        self.window = (rule.fixed or window) if window else 0
        if not self.window:
            return [False] * self.count
        pattern = self.source.model_value("attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            flags = [bool(value) for value in pattern[: self.count]]
            return flags + [False] * (self.count - len(flags))
        period = pattern if _is_count(pattern) and rule.period else rule.period
        if period is None:
            raise self.error("attention.sliding_window_pattern", "a list", pattern)
        if self.architecture == "lfm2":
            return [bool(heads) for heads in self.kv_heads]
        full = 0 if rule.is_full_first else period - 1
        return [period == 0 or number % period != full for number in range(self.count)]

    def find_recurrent(self) -> list[bool]:
        state = rules.STATES.get(self.architecture)
        numbers = range(self.count)
        if state is None:
            return [False] * self.count
        if state.layers in (Recurrence.ALL, Recurrence.BESIDE_ATTENTION):
            return [True] * self.count
        if state.layers is Recurrence.NO_KV_HEADS:
            return [number < self.run_count and not self.kv_heads[number] for number in numbers]
        if state.layers is Recurrence.NEITHER:
            counts = zip(self.kv_heads, self.dense_widths, strict=True)
            return [n < self.run_count and not any(both) for n, both in enumerate(counts)]
        flags = self.by_layer("attention.recurrent_layers")
        if flags is not None:
            return [bool(value) for value in flags]
        interval = 4 if state.layers is Recurrence.EACH_4TH_ATTENDS else 8
        interval = max(1, self.number("full_attention_interval", interval))
        return [number < self.run_count and (number + 1) % interval != 0 for number in numbers]

    def state_count(self, number: int) -> int:
        if self.is_compressed:
            return self.compressor_count(number)
        if not self.recurrent[number]:
            return 0
        kind = rules.STATES[self.architecture].kind
        if kind is StateKind.CONVOLUTION:
            return self.embedding_length * max(0, self.number("shortconv.l_cache", None) - 1)
        if kind is StateKind.SQUARE:
            return self.head_length("key", 0) ** 2 * self.heads[0]
        kernel = self.number("ssm.conv_kernel", 0)
        if kind is StateKind.DELTA:
            length = self.number("kda.head_dim", None)
            steps = kernel - 1 if kernel else 3
            return (3 * steps + length) * length * self.heads[0]
        inner, size = self.number("ssm.inner_size", None), self.number("ssm.state_size", None)
        groups = self.number("ssm.group_count", 0) if kind is StateKind.GROUPED_MAMBA else 0
        convolution = max(0, kernel - 1) * (inner + 2 * groups * size)
        return convolution + inner * size + self.embedded_state_count(number)

    def compressor_count(self, number: int) -> int:
        """Return the elements in which tokens gather until they make a row (deepseek4)."""
        ratio = self.compressions[number]
        key = self.head_length("key", number)
        if ratio == rules.FINE:
            return 2 * 2 * rules.FINE * 2 * (key + self.length("indexer.key_length"))
        return 2 * rules.COARSE * key if ratio == rules.COARSE else 0

    def embedded_state_count(self, number: int) -> int:
        """Return the elements that embeddings of several tokens add to a state (qwen4exp)."""
        layers = self.source.model_value("ple.layers")
        if self.architecture != "qwen4exp" or not isinstance(layers, tuple) or number not in layers:
            return 0
        width = self.number("hyper_connection.count", 0) * self.embedding_length
        kernel, size = self.number("ple.conv_kernel", 0), self.number("ple.ngram_size", 0)
        return max(0, kernel - 1) * size * width

    def index_key_count(self, number: int) -> int:
        """Return the elements of an indexer's keys for one token."""
        architecture = self.architecture
        if self.is_compressed:
            return self.length("indexer.key_length")
        if architecture not in rules.INDEXED or number >= self.run_count:
            return 0
        if architecture == "minimax-m3" and number < self.number("leading_dense_block_count", 0):
            return 0
        if architecture == "hy_v4" and not self.length("indexer.top_k"):
            return 0
        if architecture in rules.SHARED_INDEXERS and not self.indexer_types()[number]:
            return 0
        pooled = self.length("indexer.kpool")
        if architecture == "qwen4exp":
            pooled = max(self.compressions)
        rows = rules.POOLED_ROWS.get(architecture, 1) if pooled else 1
        return rows * self.length("indexer.key_length")

    def indexer_types(self) -> list[int]:
        """Return by layer whether it has an indexer of its own."""
        key = "attention.indexer.types"
        types = self.source.model_value(key)
        if isinstance(types, tuple):
            return [*self.counts(key, types), *[0] * self.count]
        if type(types) is int:
            return [types] * self.count
        is_5_2 = self.number("context_length", 0) >= rules.GLM_5_2_CONTEXT
        if self.architecture == "glm-dsa" and is_5_2:
            return [*rules.GLM_5_2_TYPES, *[0] * self.count]
        return [int(self.architecture in ("glm-dsa", "glm5-next"))] * self.count

    def length(self, name: str, default: int = 0) -> int:
        return self.number(f"attention.{name}", default)

    def number(self, key: str, default: int | None) -> int:
        """Return a number of the metadata; raise SourceError for none without a default."""
        value = self.source.model_value(key)
        if value is None and default is not None:
            return default
        if not _is_count(value):
            raise self.error(key, "a number", value)
        return value

    def by_layer(self, key: str) -> list[int] | None:
        """Return the numbers of all layers, which may be one number; None without any."""
        value = self.source.model_value(key)
        if value is None:
            return None
        if not isinstance(value, tuple):
            return [self.number(key, None)] * self.count
        if len(value) < self.count:
            raise self.error(key, f"{self.count} numbers", f"{len(value)}")
        return self.counts(key, value[: self.count])

    def counts(self, key: str, values: Sequence[object]) -> list[int]:
        """Return a list of the metadata as counts, which may be true or false."""
        for value in values:
            if not _is_count(value) and not isinstance(value, bool):
                raise self.error(key, "numbers", value)
        return [int(value) for value in values if isinstance(value, int)]

    def error(self, key: str, expected: object, value: object) -> SourceError:
        return SourceError(
            "the metadata does not determine the size of the context",
            path=self.source.shards[0].path,
            place=f"key '{self.architecture}.{key}'",
            expected=expected,
            found="no such key" if value is None else value,
        )


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
