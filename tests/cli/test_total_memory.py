"""The memory of a model in all: as `serve` says it, and as a control group counts it."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moepack.bench.control_group import ControlGroup, control_group
from moepack.host.control_groups import read_number
from tests.support import architectures
from tests.support.children import MOEPACK, PATIENCE, Piped
from tests.support.needs import needs_llama

pytestmark = [pytest.mark.long, needs_llama]
MIB = 1 << 20
SIZES: dict[str, Any] = {
    **{"block_count": 12, "expert_count": 48, "embedding_length": 512, "context_length": 8192},
    **{"expert_feed_forward_length": 768, "expert_used_count": 12},
    **{f"attention.{name}": 4 for name in ("head_count", "head_count_kv")},
    **{f"attention.{name}": 128 for name in ("key_length", "value_length")},
}
"""Of a model with 890 MiB of experts, which are holes in its file; a token of context is 24 KiB."""
_USAGE = {"memory.usage_in_bytes": "total_", "memory.current": ""}
"""The file of both versions, and how the fields of memory.stat begin."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return architectures.write("qwen3moe", path, has_experts=False, **SIZES)


@contextmanager
def watched(group: ControlGroup) -> Iterator[list[int]]:
    """Yield a list whose only item is the most memory so far that is no page cache."""
    most, ended = [0], threading.Event()
    (folder,) = group.folders
    (usage,) = (name for name in _USAGE if (folder / name).exists())

    def watch() -> None:
        while not ended.wait(0.02):
            cached = [
                read_number(folder / "memory.stat", f"{_USAGE[usage]}{one}_file") or 0
                for one in ("active", "inactive")
            ]
            most[0] = max(most[0], (read_number(folder / usage) or 0) - sum(cached))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def parts_of(line: str) -> dict[str, float]:
    """Return the parts in the first line of a run, in MiB."""
    units = {"B": 1 / MIB, "KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}
    pattern = r"([a-z ]+?)(?: of [0-9,]+ tokens)?:? ([0-9.]+) ([KMG]?i?B)\b"
    return {
        name.strip(): float(length) * units[unit]
        for name, length, unit in re.findall(pattern, line)
    }


LARGE = [pytest.param(*one, marks=pytest.mark.slow) for one in ((600, 4096), (900, None))]


@pytest.mark.parametrize(("total", "context"), [(320, 256), *LARGE])
def test_a_total_is_kept_within_five_percent(total: int, context: int | None, model: Path) -> None:
    """When all of it is in use: a prompt that fills the context, and others that are kept."""
    words = ["--total-memory", f"{total}MiB", *(["-c", str(context)] if context else [])]
    command = [*MOEPACK, "serve", str(model), "--port", "0", "-t", "2", "--no-learn", *words]
    with control_group(2 << 30) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        with Piped(*group.command(command)) as process, httpx.Client(timeout=PATIENCE) as client:
            with watched(group) as most:
                url = process.stdout.readline().split()[-1]
                count = client.get(f"{url}/slots").json()[0]["n_ctx"] - 8
                for number, length in enumerate((count, *(count // 8,) * 5)):
                    prompt = [3 + (number + 7 * one + one * one) % 240 for one in range(length)]
                    body = {"prompt": prompt, "n_predict": 2, "ignore_eos": True}
                    assert client.post(f"{url}/completion", json=body).is_success
            process.terminate()
            (line,) = (one for one in process.stderr.read().splitlines() if "all together" in one)
    parts = parts_of(line)
    assert parts["all together"] == pytest.approx(total, rel=0.01)
    assert 0.95 <= (most[0] / MIB + parts["dense weights"]) / total <= 1.05, line
