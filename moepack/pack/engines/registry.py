"""The formats that packs can be exported to, in the order in which they are listed."""

from __future__ import annotations

from moepack.common.errors import RequestError
from moepack.pack.engines import (
    anemll,
    ggml_moe_pack,
    moe_flash,
    moe_stream_dir,
    sglang,
    stock_gguf,
)
from moepack.pack.engines.contract import Engine

ENGINES: tuple[Engine, ...] = (
    stock_gguf.ENGINE,
    anemll.ENGINE,
    sglang.ENGINE,
    ggml_moe_pack.ENGINE,
    moe_stream_dir.ENGINE,
    moe_flash.ENGINE,
)


def find(name: str) -> Engine:
    """Return the format of a name; raise RequestError if there is none."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    expected = ", ".join(engine.name for engine in ENGINES)
    raise RequestError("no such format", argument="engine", expected=expected, found=name)
