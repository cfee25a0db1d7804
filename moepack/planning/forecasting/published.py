"""The published formula for experts on a drive, for comparison.

"MoE experts on SSD" (rentry, April 2026) has it as a script, estimate_speed.py; parameters have the
names of its options, with its defaults: GLM-5 in IQ4_XS on a computer with 128 GiB. It takes each
expert that is new in a window of tokens, or does not fit, to be read once in that window. Its
author says that this is far too little if memory is short; docs/numbers.md says by how much.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from moepack.common.errors import RequestError


class FormulaParameters(NamedTuple):
    """The options of estimate_speed.py: bytes, bytes a second, seconds, and counts."""

    ram_bytes: float = 128 * 1024**3
    memory_bw_bytes_per_sec: float = 100e9
    ssd_bw_bytes_per_sec_raw: float = 7e9
    ssds_in_raid: float = 1
    dense_gpu_latency_per_token: float = 0.022
    bytes_per_expert: float = 20_054_016
    num_layers: float = 74
    experts_per_layer: float = 256
    active_per_layer: float = 8
    average_active_per_batch: float = 13_190
    average_expert_turnover_per_batch: float = 2_412
    batch_size: float = 128


_DIVISORS = {
    "memory_bw_bytes_per_sec",
    "ssd_bw_bytes_per_sec_raw",
    "ssds_in_raid",
    "bytes_per_expert",
    "batch_size",
}


@dataclass(frozen=True, slots=True)
class PublishedFacts:
    """The speed by the formula, and its parameters; the terms are seconds a token."""

    tokens_per_second: float
    dense_seconds: float
    memory_seconds: float
    drive_seconds: float
    parameters: FormulaParameters


def published_formula(**options: float) -> PublishedFacts:
    """Forecast by the published formula, with `options` as `FormulaParameters` has them.

    Raises RequestError for impossible numbers.
    """
    inputs = FormulaParameters(**options)
    for name, value in inputs._asdict().items():
        least = "more than 0" if name in _DIVISORS else "0 or more"
        if not math.isfinite(value) or value < 0 or (name in _DIVISORS and not value):
            problem = "not a possible number"
            raise RequestError(problem, place=f"--{name}", expected=least, found=value)
    no_room = max(0.0, inputs.average_active_per_batch - inputs.ram_bytes / inputs.bytes_per_expert)
    read = (inputs.average_expert_turnover_per_batch + no_room) * inputs.bytes_per_expert
    drive = read / (inputs.ssds_in_raid * inputs.ssd_bw_bytes_per_sec_raw) / inputs.batch_size
    used = inputs.active_per_layer * inputs.num_layers * inputs.bytes_per_expert
    memory = used / inputs.memory_bw_bytes_per_sec
    dense = inputs.dense_gpu_latency_per_token
    if not dense + memory + drive:
        raise RequestError("a token takes no time with these numbers")
    return PublishedFacts(1 / (dense + memory + drive), dense, memory, drive, inputs)
