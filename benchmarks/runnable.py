"""A model that runs: true dimensions, random weights of the right size, a small real vocabulary."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moepack.source.shards import open_source

_VOCABULARY = Path(__file__).parent.parent / "fixtures/qwen3moe-Q4_K_M-ntfs-t6-00001-of-00006.gguf"
_WORDS = 512
_EMBEDDING, _N_FF, _EXPERTS, _USED = 2048, 768, 128, 8
_HEADS, _KV_HEADS, _HEAD = 32, 4, 128
"""Of Qwen3-30B-A3B."""
_SPREAD = 0.02
"""Of the weights: about what a trained model has."""
_F32, _F16, _Q4_K, _Q6_K = 0, 1, 12, 14
