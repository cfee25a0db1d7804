"""What a run counts is what a simulation of its own selections counts: of a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moepack.common.shape import ExpertKey
from moepack.packing.pack_model import pack_model
from moepack.traces.caching import cache as caching
from moepack.traces.caching.cache import Tally
from tests.support import architectures
from tests.support.needs import needs_llama
from tests.support.supervised import Supervised, supervised

pytestmark = needs_llama
LAYERS, EXPERTS = 6, 8
PROMPTS = [[(31 * n * n + 5 * text) % 250 for n in range(6 * text + 1)] for text in range(2)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model whose experts are all of one length."""
    folder = tmp_path_factory.mktemp("one_length")
    pack_model(architectures.write("qwen3moe", folder / "m.gguf", block_count=LAYERS), folder / "p")
    return folder / "p"


def steps(run: Supervised) -> Iterator[list[ExpertKey]]:
    """Yield the steps of all calls so far, those of the server's warm-up among them."""
    for call in run.supervisor.pop_calls(with_open=True):
        for layer, rows in call.layers.items():
            yield [ExpertKey(layer, int(expert)) for row in rows for expert in row]


@pytest.mark.parametrize("policy", caching.POLICIES)
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_server_misses_what_a_simulation_misses(packed: Path, policy: str, share: float) -> None:
    with supervised(packed, memory="floor", micro_batch=1) as run:
        reserve = run.supervisor.floor // 2
    with supervised(packed, memory=1 << 40, micro_batch=1) as run:
        room = run.supervisor.whole_length // (LAYERS * EXPERTS)
    budget = int(share * LAYERS * EXPERTS) * room
    with supervised(
        packed, memory=budget + reserve, micro_batch=1, policy=policy, prefetch=False, records=True
    ) as run:
        with run.program("--micro-batch", 1, "--tokens", 60) as program:
            for prompt in PROMPTS:
                assert isinstance(program.ask(prompt), list)
        usage = run.supervisor.usage
        keys = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
        cache, expected = caching.make(policy, budget, dict.fromkeys(keys, room)), Tally()
        for step in steps(run):
            cache.step(step, expected)
    assert (usage.hit_count, usage.miss_count) == (expected.hit_count, expected.miss_count)
    assert expected.miss_count > LAYERS * EXPERTS
