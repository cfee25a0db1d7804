"""A program that computes logits of models: `python -m tests.support.logits_program`.

Each line of standard input is JSON: a model, variables of the environment, and a file for what
`stepwise_logits` gives; a child computes them. Each gets a line with how the child ended.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.support import llama_cpp

BATCH_COUNT = 2
"""Tokens that are computed at once, so that the experts of a step are not all of a layer."""
_PROMPT = [(7 * n) % 200 + 3 for n in range(8)]
BATCHES = [_PROMPT[start : start + BATCH_COUNT] for start in range(0, 8, BATCH_COUNT)]
BATCHES += [[(37 * n) % 200 + 3] for n in range(12)]


def compute(path: Path) -> llama_cpp.Floats:
    """Return the logits behind each of BATCHES."""
    return llama_cpp.stepwise_logits(path, BATCHES, context=96)


def _compute_in_child(path: str, variables: Mapping[str, str], target: str) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            os.environ.update(variables)  # which the preloaded library reads when a model is mapped
            np.save(target, compute(Path(path)))
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Compute what is asked for."""
    llama_cpp.load()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_compute_in_child(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
