"""`python -m moepack.bench.stock_run`: a prompt under llama.cpp alone, which maps the model.

Measured as `moepack run` measures itself: the tokens after the first. Weights are not repacked: a
repacked copy would have to fit into memory. Prompts are computed in batches of the same size: with
others the last bits of logits differ, and sooner or later the text does.
"""

import json
import os
import sys
import time
from typing import Any

from moepack.errors import MoepackError
from moepack.llama_cpp import decoding, library
from moepack.llama_cpp.log import ErrorLines
from moepack.llama_cpp.sampling import Sampling, sampler
from moepack.llama_cpp.vocabulary import Vocabulary


def main(
    path: str, prompt: str, count: int, context: int, threads: int, batch_count: int
) -> dict[str, Any]:
    """Return the text that a model goes on with, and how fast it came."""
    llama: Any = library.load()
    with ErrorLines(llama) as errors:
        params = llama.llama_model_default_params()
        params.use_extra_bufts = False
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if model is None:
            raise SystemExit(f"llama.cpp cannot load the model: {errors}")
        options = llama.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = options.n_ubatch = batch_count
        options.n_threads = options.n_threads_batch = threads
        opened = llama.llama_init_from_model(model, options)
        vocabulary = Vocabulary(llama, model)

        def decode(tokens: list[int]) -> None:
            decoding.decode(llama, opened, tokens, errors, path=path)

        tokens = vocabulary.tokenize(prompt)
        for start in range(0, len(tokens), batch_count):
            decode(tokens[start : start + batch_count])
        text, steps, started = b"", 0, time.perf_counter()
        with sampler(llama, Sampling(temperature=0)) as chain:
            for number in range(count):
                token = llama.llama_sampler_sample(chain, opened, -1)
                if vocabulary.ends(token):
                    break
                text += vocabulary.text_of(token)
                if number + 1 < count:
                    decode([token])
                    steps += 1
        seconds = time.perf_counter() - started
    speed = steps / seconds if steps else None
    return {"text": text.decode(errors="replace"), "tokens_per_second": speed}


if __name__ == "__main__":
    # A program of its own, whose result is what it prints.
    try:
        result = main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]))
    except MoepackError as error:
        raise SystemExit(str(error)) from None
    os.write(1, json.dumps(result).encode())
