"""Which token comes next."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moepack.llama_cpp.structs import SamplerParams

TOP_K, TOP_P = 40, 0.95
"""What llama.cpp samples from unless told otherwise."""

MAX_SEED = (1 << 32) - 2
"""The next one asks llama.cpp for a seed by chance."""


@contextmanager
def sampler(library: Any, temperature: float, seed: int) -> Iterator[int]:
    """Make a sampler: of the likeliest tokens by temperature, or always the likeliest at 0."""
    chain = library.llama_sampler_chain_init(SamplerParams(True))
    if temperature > 0:
        links = [
            library.llama_sampler_init_top_k(TOP_K),
            library.llama_sampler_init_top_p(TOP_P, 1),
            library.llama_sampler_init_temp(temperature),
            library.llama_sampler_init_dist(seed),
        ]
    else:
        links = [library.llama_sampler_init_greedy()]
    for link in links:
        library.llama_sampler_chain_add(chain, link)
    try:
        yield chain
    finally:
        library.llama_sampler_free(chain)
