"""One sequence of tokens, for an engine and for llama.cpp alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moepack
from moepack.running.engine import Engine, EngineOptions
from tests.support import architectures, llama_cpp

CONTEXT, _THREADS = 96, 1
BATCHES = [[(7 * n) % 200 + 3 for n in range(30)], *([(11 * n) % 200 + 3] for n in range(25))]
LEAST = EngineOptions(memory="floor", context=CONTEXT, threads=_THREADS)


@contextmanager
def engine_of(model: str, folder: Path, options: EngineOptions = LEAST) -> Iterator[Engine]:
    """Run one of the models of all architectures from the file that it is in, `m.gguf`."""
    if not (folder / "index").exists():
        moepack.index_model(architectures.write(model, folder / "m.gguf"), folder / "index")
    with moepack.open(folder / "index") as pack, Engine(pack, options) as engine:
        yield engine


def run(engine: Engine) -> list[Any]:
    """Feed all batches; return the logits behind each."""
    engine.rewind(0)
    found = []
    for batch in BATCHES:
        engine.feed(batch)
        found.append(engine.logits())
    return found


def loaded(path: Path, batch_count: int) -> list[Any]:
    """Return the logits of the model that is fully loaded."""
    return llama_cpp.stepwise_logits(
        path, BATCHES, context=CONTEXT, batch_count=batch_count, threads=_THREADS
    )


def given_up_layers(engine: Engine) -> set[int]:
    """Return the layers of which something is not held, or not any more."""
    held = engine._store._cache
    return {key.layer for key in engine._places if key not in held}
