"""Facts of attention that follow from a model's architecture, and not from its metadata.

Facts of llama.cpp b11549: `load_arch_hparams` of each architecture (src/models/*.cpp; the file is
named if it is not called as the architecture) says which layers attend to a window, and which keep
a state; `llama_model::create_memory` (llama-model.cpp) says which caches there are. An architecture
in no table here is taken to have keys and values of all tokens in all layers.
"""

import re
from enum import Enum
from typing import NamedTuple


class WindowRule(NamedTuple):
    """The layers that attend to a window of tokens only, and its length.

    Each `period`-th layer attends to all: the last of each period, or the first. Metadata may state
    another period, or list the layers; with None it has to. 0 means that all layers have a window.
    `default` is the window if metadata states none, `fixed` the one that overrules it.
    """

    period: int | None = None
    is_full_first: bool = False
    default: int | None = None
    fixed: int | None = None


_LISTED = WindowRule()

WINDOWS = {
    "afmoe": WindowRule(4),
    "cohere2": WindowRule(4),
    "cohere2moe": WindowRule(4, is_full_first=True),
    "deepseek4": WindowRule(0),
    "dots3note": _LISTED,
    "exaone-moe": WindowRule(4, default=128),
    "gemma2": WindowRule(2, default=4096),
    "gemma3": WindowRule(6),
    "gemma3n": WindowRule(5),
    "gemma4": _LISTED,
    "gpt-oss": WindowRule(2),  # openai-moe.cpp
    "granite_swa": _LISTED,
    "laguna": WindowRule(4, is_full_first=True),
    "lfm2": WindowRule(0),
    "llama4": WindowRule(4, default=8192, fixed=8192),  # attention in chunks, cached as a window is
    "maple": _LISTED,
    "mellum": WindowRule(4),
    "mimo2": _LISTED,
    "muse-glimmer": WindowRule(4),
    "olmo2": WindowRule(4),
    "plamo3": WindowRule(8),
    "smallthinker": WindowRule(4, is_full_first=True, fixed=4096),
    "step35": _LISTED,
}


class Recurrence(Enum):
    """The layers that keep a state instead of keys and values.

    With intervals, metadata may list the layers, or state another interval.
    """

    NO_KV_HEADS = "those without KV heads"
    NEITHER = "those with neither KV heads nor a dense FFN; and attention has no dense FFN either"
    EACH_4TH_ATTENDS = "all but each 4th"
    EACH_8TH_ATTENDS = "all but each 8th"
    BESIDE_ATTENTION = "all of them, beside keys and values"
    ALL = "all of them"


class StateKind(Enum):
    """The parts of a state (llama-hparams.cpp, `n_embd_r` and `n_embd_s`)."""

    MAMBA = "a convolution over the inner size, and the inner size by the state size"
    GROUPED_MAMBA = "the same, with groups in the convolution"
    CONVOLUTION = "a short convolution"
    DELTA = "convolutions and a square by head (KDA)"
    SQUARE = "a square by head (lightning attention)"


class State(NamedTuple):
    """The states of an architecture."""

    layers: Recurrence
    kind: StateKind


STATES = {
    "bailingmoe3": State(Recurrence.NO_KV_HEADS, StateKind.DELTA),
    "falcon-h1": State(Recurrence.BESIDE_ATTENTION, StateKind.GROUPED_MAMBA),
    "glm5-next": State(Recurrence.NO_KV_HEADS, StateKind.DELTA),
    "granitehybrid": State(Recurrence.NO_KV_HEADS, StateKind.GROUPED_MAMBA),
    "jamba": State(Recurrence.NO_KV_HEADS, StateKind.MAMBA),
    "kimi-k3": State(Recurrence.NO_KV_HEADS, StateKind.DELTA),
    "kimi-linear": State(Recurrence.NO_KV_HEADS, StateKind.DELTA),
    "lfm2": State(Recurrence.NO_KV_HEADS, StateKind.CONVOLUTION),
    "lfm2moe": State(Recurrence.NO_KV_HEADS, StateKind.CONVOLUTION),
    "mamba": State(Recurrence.ALL, StateKind.MAMBA),
    "mamba2": State(Recurrence.ALL, StateKind.GROUPED_MAMBA),
    "minimax-01": State(Recurrence.EACH_8TH_ATTENDS, StateKind.SQUARE),
    "nemotron_h": State(Recurrence.NEITHER, StateKind.GROUPED_MAMBA),
    "nemotron_h_moe": State(Recurrence.NEITHER, StateKind.GROUPED_MAMBA),  # nemotron-h.cpp
    "plamo2": State(Recurrence.NO_KV_HEADS, StateKind.GROUPED_MAMBA),
    "qwen35": State(Recurrence.EACH_4TH_ATTENDS, StateKind.GROUPED_MAMBA),
    "qwen35moe": State(Recurrence.EACH_4TH_ATTENDS, StateKind.GROUPED_MAMBA),
    "qwen3next": State(Recurrence.EACH_4TH_ATTENDS, StateKind.GROUPED_MAMBA),
    "qwen4exp": State(Recurrence.EACH_4TH_ATTENDS, StateKind.GROUPED_MAMBA),
}

FINE, COARSE = 4, 128
"""How many tokens a row of a compressed layer stands for in deepseek4 (llama-kv-cache-dsv4.cpp)."""

INDEXED = {"deepseek32", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3", "qwen4exp"}
"""Architectures with an indexer that keeps keys of its own (sparse attention)."""
INDEXED_WITH_VALUES = {"minimax-m3"}
"""Those with values for it too (llama-kv-cache-msa.cpp)."""
SHARED_INDEXERS = {"dots3note", "glm-dsa", "glm5-next", "hy_v4"}
"""Those with layers that use the selection of an earlier layer, and have no indexer then."""
POOLED_ROWS = {"glm5-next": 3, "qwen4exp": 2}
"""The keys that an indexer keeps for a token if it pools them."""

GLM_5_2_TYPES = (1, 1, *(1, 0, 0, 0) * 19)
"""The layers of GLM-5.2 with an indexer, if metadata does not say so (glm-dsa.cpp)."""
GLM_5_2_CONTEXT = 1 << 20
"""The context length from which on a glm-dsa model is that one."""

KV_LAYERS = {"gemma3n": 20}
"""The first so many layers have keys and values; later ones use those of an earlier one."""

_NEXT = r"nextn\.(embed_tokens|shared_head_)"
_FFN = r"ffn_(?!norm)|exp_probs_b"
LOADED_OF_MTP = {
    "cohere2moe": re.compile(_NEXT),
    "hy_v3": re.compile(f"{_FFN}|{_NEXT}"),
    "step35": re.compile(f"attn_([qk]_norm|gate)|{_FFN}|{_NEXT}"),
}
"""Tensors, behind `blk.N.`, that llama.cpp loads of layers for multi-token prediction though it
does not run them, experts among them: of architectures without `mtp_flags` in
`load_arch_tensors`."""

MTP_IS_CACHED = {"bailingmoe3", "hy_v4", "minimax-m3", "nemotron_h_moe", "deepseek4"}
"""Architectures that keep keys and values for layers of multi-token prediction, not run."""

NO_CACHE = {"dream", "llada", "llada-moe", "rnd1"}
"""Diffusion models, which keep nothing between steps."""

NO_FLASH_ATTENTION = {"grok"}
"""Architectures for which llama.cpp turns it off (`llama_init_from_model`)."""
