"""What of a model's attention follows from its architecture, and not from its metadata.

Facts of llama.cpp b11549: `load_arch_hparams` of each architecture (src/models/*.cpp; the file is
named where it is not called as the architecture is) says which layers attend to a window, and which
keep a state; `llama_model::create_memory` (llama-model.cpp) says which caches there are. What is in
no table here has keys and values in all layers, as far as is known.
"""

import re
from enum import Enum
from typing import NamedTuple


class Window(NamedTuple):
    """Which layers attend to a window of tokens only, and how long that is.

    Each `period`-th layer attends to all: the last of each period, or the first. Metadata may state
    another period, or list the layers; with None it has to. 0 means that all layers have a window.
    `default` is the window where metadata states none, `fixed` the one that overrules it.
    """

    period: int | None = None
    is_full_first: bool = False
    default: int | None = None
    fixed: int | None = None


_LISTED = Window()

WINDOWS = {
    "afmoe": Window(4),
    "cohere2": Window(4),
    "cohere2moe": Window(4, is_full_first=True),
    "deepseek4": Window(0),
    "dots3note": _LISTED,
    "exaone-moe": Window(4, default=128),
    "gemma2": Window(2, default=4096),
    "gemma3": Window(6),
    "gemma3n": Window(5),
    "gemma4": _LISTED,
    "gpt-oss": Window(2),  # openai-moe.cpp
    "granite_swa": _LISTED,
    "laguna": Window(4, is_full_first=True),
    "lfm2": Window(0),
    "llama4": Window(4, default=8192, fixed=8192),  # attention in chunks, cached as a window is
    "maple": _LISTED,
    "mellum": Window(4),
    "mimo2": _LISTED,
    "muse-glimmer": Window(4),
    "olmo2": Window(4),
    "plamo3": Window(8),
    "smallthinker": Window(4, is_full_first=True, fixed=4096),
    "step35": _LISTED,
}


class Recurrence(Enum):
    """Which layers keep a state instead of keys and values.

    Where intervals say so, metadata may list the layers, or state another interval.
    """

    NO_KV_HEADS = "those without KV heads"
    NEITHER = "those with neither KV heads nor a dense FFN; and attention has no dense FFN either"
    EACH_4TH_ATTENDS = "all but each 4th"
    EACH_8TH_ATTENDS = "all but each 8th"
    BESIDE_ATTENTION = "all of them, beside keys and values"
    ALL = "all of them"


class StateKind(Enum):
    """What a state consists of (llama-hparams.cpp, `n_embd_r` and `n_embd_s`)."""

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
"""Those of them where llama.cpp keeps values for it too (llama-kv-cache-msa.cpp)."""
SHARED_INDEXERS = {"dots3note", "glm-dsa", "glm5-next", "hy_v4"}
"""Those where a layer may use the choice of an earlier layer, and has no indexer then."""
POOLED_ROWS = {"glm5-next": 3, "qwen4exp": 2}
"""How many keys an indexer keeps for a token where it pools them."""

GLM_5_2_TYPES = (1, 1, *(1, 0, 0, 0) * 19)
"""Which layers of GLM-5.2 have an indexer, where metadata does not say so (glm-dsa.cpp)."""
GLM_5_2_CONTEXT = 1 << 20
"""The context length from which on a glm-dsa model is that one."""

KV_LAYERS = {"gemma3n": 20}
"""How many of the first layers have keys and values; later ones use those of an earlier one."""

_NEXT = r"nextn\.(embed_tokens|shared_head_)"
_FFN = r"ffn_(?!norm)|exp_probs_b"
LOADED_OF_MTP = {
    "cohere2moe": re.compile(_NEXT),
    "hy_v3": re.compile(f"{_FFN}|{_NEXT}"),
    "step35": re.compile(f"attn_([qk]_norm|gate)|{_FFN}|{_NEXT}"),
}
"""Names, behind `blk.N.`, of what llama.cpp loads of layers for multi-token prediction though it
does not run them: experts among them (those whose `load_arch_tensors` does without `mtp_flags`)."""

MTP_IS_CACHED = {"bailingmoe3", "hy_v4", "minimax-m3", "nemotron_h_moe", "deepseek4"}
"""Architectures whose layers for multi-token prediction have keys and values without being run."""

NO_CACHE = {"dream", "llada", "llada-moe", "rnd1"}
"""Diffusion models, which keep nothing from one step to the next."""

NO_FLASH_ATTENTION = {"grok"}
"""Architectures for which llama.cpp turns it off (`llama_init_from_model`)."""

PLAIN = {
    *("arctic", "bailingmoe", "bailingmoe2", "dbrx", "deepseek", "deepseek2", "deepseek2-ocr"),
    *("dots1", "ernie4_5-moe", "glm4moe", "granite", "granitemoe", "grok", "grovemoe"),
    *("hunyuan-moe", "hy_v3", "k2-horizon", "llama", "minicpm", "minimax-m2", "mistral3"),
    *("mistral4", "olmoe", "phimoe", "qwen2moe", "qwen3moe", "qwen3vlmoe", "refact"),
}
"""Architectures of which it is known that they have nothing of all this."""

KNOWN = {*WINDOWS, *STATES, *INDEXED, *NO_CACHE, *PLAIN}
