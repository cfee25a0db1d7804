"""`python -m moepack.bench.stock_run`: a prompt under llama.cpp alone.

Measured as `moepack run` measures itself: the tokens after the first. Prompts are computed in
batches of the same size: with others the last bits of logits differ, and sooner or later the text
does.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

from moepack.errors import MachineError, MoepackError
from moepack.llama_cpp import decoding, library
from moepack.llama_cpp.log import ErrorLines
from moepack.llama_cpp.sampling import Sampling, sampler
from moepack.llama_cpp.vocabulary import Vocabulary

MAPPED = "llama.cpp, mapped"
READ = "llama.cpp, read"
DEFAULTS = "llama.cpp, defaults"
LOADINGS = MappingProxyType(
    {
        MAPPED: {"load_mode": 1, "use_extra_bufts": False},
        READ: {"load_mode": 0, "use_extra_bufts": False},
        DEFAULTS: {},
    }
)
"""How a model is loaded: what is set of `llama_model_params` (llama.h of b11549).

With its defaults llama.cpp repacks weights, where it has a faster layout for the processor. The
copy has to fit into memory, and the last bits of its logits are others.
"""


class Stock:
    """The model at `path` under llama.cpp alone, loaded as LOADINGS says: until the program ends.

    Raises MachineError where llama.cpp refuses it.
    """

    def __init__(
        self,
        llama: Any,
        errors: ErrorLines,
        loading: str,
        path: str,
        *,
        context: int,
        threads: int,
        batch_count: int,
    ) -> None:
        self._library = llama
        self._path = path
        self._errors = errors
        params = self._library.llama_model_default_params()
        for name, value in LOADINGS[loading].items():
            setattr(params, name, value)
        model = self._library.llama_model_load_from_file(os.fsencode(path), params)
        if model is None:
            raise MachineError(f"llama.cpp cannot load the model: {self._errors}", path=path)
        options = self._library.llama_context_default_params()
        options.n_ctx = context
        options.swa_full = False  # as llama.cpp's programs have it
        options.n_batch = options.n_ubatch = batch_count
        options.n_threads = options.n_threads_batch = threads
        self._batch_count = batch_count
        self._context = self._library.llama_init_from_model(model, options)
        if self._context is None:
            raise MachineError(f"llama.cpp cannot make a context: {self._errors}", path=path)
        self.vocabulary = Vocabulary(self._library, model)

    def feed(self, tokens: Sequence[int]) -> None:
        """Go on with `tokens`, batch by batch."""
        for start in range(0, len(tokens), self._batch_count):
            batch = tokens[start : start + self._batch_count]
            decoding.decode(self._library, self._context, batch, self._errors, path=self._path)

    def go_on(self, count: int) -> Iterator[int]:
        """Yield up to `count` tokens, each the likeliest after those before it."""
        with sampler(self._library, Sampling(temperature=0)) as chain:
            for number in range(count):
                token = self._library.llama_sampler_sample(chain, self._context, -1)
                if self.vocabulary.ends(token):
                    break
                yield token
                if number + 1 < count:
                    self.feed([token])


def main(
    loading: str, path: str, prompt: str, count: int, context: int, threads: int, batch_count: int
) -> dict[str, Any]:
    """Return the text that a model goes on with, and how fast it came."""
    llama: Any = library.load()
    sizes = {"context": context, "threads": threads, "batch_count": batch_count}
    with ErrorLines(llama) as errors:
        stock = Stock(llama, errors, loading, path, **sizes)
        stock.feed(stock.vocabulary.tokenize(prompt))
        started = time.perf_counter()
        tokens = list(stock.go_on(count))
        seconds = time.perf_counter() - started
    text = b"".join(map(stock.vocabulary.text_of, tokens))
    step_count = min(len(tokens), count - 1)
    speed = step_count / seconds if step_count else None
    return {"text": text.decode(errors="replace"), "tokens_per_second": speed}


if __name__ == "__main__":
    # A program of its own, whose result is what it prints.
    try:
        name, model, begin = sys.argv[1:4]
        result = main(name, model, begin, *map(int, sys.argv[4:8]))
    except MoepackError as error:
        raise SystemExit(str(error)) from None
    os.write(1, json.dumps(result).encode())
