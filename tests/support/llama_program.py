"""A llama.cpp program: its own server, of xllamacpp. `python -m tests.support.llama_program MODEL`.

Each line of standard input is a JSON array of prompts, in token ids, which are continued at once,
each in a slot of its own. Each gets a line with what came of it: an array of `Answer`s or, where
the server refused, a text; with several models, an array of those. It ends with its input.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tests.support import seccomp

TOKEN_COUNT = 8
"""How many tokens each answer has, unless told otherwise."""


class Answer(NamedTuple):
    """Token ids, and for each the ids that were likeliest in its place, with their logprobs."""

    tokens: list[int]
    likeliest: list[list[tuple[int, float]]]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=TOKEN_COUNT)
    parser.add_argument("--another", action="append", default=[], help="a model that answers too")
    parser.add_argument("--load", default="MMAP", help="how the model is loaded")
    parser.add_argument("--check-tensors", action="store_true")
    parser.add_argument("--contained", action="store_true", help="as in a container")
    return parser.parse_args()


def _serve(path: str, options: argparse.Namespace) -> str:
    """Start a server; return its address."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = options.slots
    params.n_ctx = 512 * options.slots
    params.n_ubatch = options.micro_batch
    params.n_batch = max(options.micro_batch, 64)
    params.no_extra_bufts = True
    params.load_mode = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{options.load}")
    params.check_tensors = options.check_tensors
    params.warmup = params.fit_params = False
    params.port = 0
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    _SERVERS.append(server)
    return str(server.listening_address)


_SERVERS: list[Any] = []
"""They end when nobody has them."""


def _ask(address: str, prompts: list[list[int]], count: int) -> list[Answer] | str:
    question = {
        "prompt": prompts if len(prompts) > 1 else prompts[0],
        "n_predict": count,
        "temperature": 0,
        "n_probs": 5,
        "return_tokens": True,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    body = json.dumps(question).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", body, headers)
    try:
        with urllib.request.urlopen(request) as reply:
            results = json.load(reply)
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return [_answer(result) for result in (results if isinstance(results, list) else [results])]


def _answer(result: dict[str, Any]) -> Answer:
    places = [place["top_logprobs"] for place in result["completion_probabilities"]]
    likeliest = [[(one["id"], one["logprob"]) for one in place] for place in places]
    return Answer(result["tokens"], likeliest)


def main() -> None:
    """Serve a model, and ask it."""
    options = _arguments()
    if options.contained:
        seccomp.contain()
    addresses = [_serve(path, options) for path in (options.model, *options.another)]
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(_ask, one, prompts, options.tokens) for one in addresses]
        answers = [one.result() for one in asked]
        print(json.dumps(answers[0] if len(answers) == 1 else answers), flush=True)
    os._exit(0)  # a server that is ended takes a second


if __name__ == "__main__":
    main()
