"""The benchmark of routing that a model repeats: its model, its tokens, its routing."""

from pathlib import Path

import pytest

from benchmarks import routed
from benchmarks.routing import Routing, made_up_routing
from tests.support.needs import needs_library

_SIZE = (512, 256)


def test_routing_that_is_made_up_is_like_that_of_a_real_model() -> None:
    """As measured of Qwen3-30B-A3B's; of uniform routers 6 of 128 are 5 %."""
    made_up, uniform = made_up_routing(layers=8), made_up_routing(layers=8, is_uniform=True)
    assert _share_of_likeliest(made_up, 8) == pytest.approx(0.40, abs=0.05)
    assert _share_of_likeliest(made_up, 32) == pytest.approx(0.82, abs=0.05)
    assert _repeated(made_up, 1) == pytest.approx(0.37, abs=0.03)
    assert _repeated(made_up, 32) == pytest.approx(0.21, abs=0.03)
    assert _repeated(uniform, 1) == pytest.approx(6 / 128, abs=0.01)


def _share_of_likeliest(routing: Routing, count: int) -> float:
    shares = []
    for layer in range(routing.layer_count):
        counts = [0] * routing.expert_count
        for token in routing.tokens:
            for expert in token[layer]:
                counts[expert] += 1
        shares.append(sum(sorted(counts)[-count:]) / sum(counts))
    return sum(shares) / len(shares)


def _repeated(routing: Routing, distance: int) -> float:
    pairs = [
        (set(before), set(after))
        for one, other in zip(routing.tokens, routing.tokens[distance:], strict=False)
        for before, after in zip(one, other, strict=True)
    ]
    return sum(len(before & after) for before, after in pairs) / sum(len(one) for one, _ in pairs)


@needs_library
def test_a_model_repeats_its_routing(tmp_path: Path) -> None:
    """llama.cpp says the tokens that are expected, and reads what LRU reads.

    But for what the server routed when it tried the model.
    """
    pytest.importorskip("xllamacpp")
    routing = made_up_routing(layers=12, experts=16, used=4)
    model = routed.Model(tmp_path, routing, _SIZE, noise=1.0)
    assert "4 of 16 experts of 234.0 KiB" in model.describe(routing)
    assert "made up" in model.describe(routing)
    texts = routed.Texts(routing, prompt_count=9, token_count=40)
    rows = list(routed.rows(model, texts, rounds=1, shares=[0.5]))
    assert all(row.value is not None for row in rows)
    (reads,) = (row.value for row in rows if row.what == "reads of LRU, without prefetching")
    assert reads is not None
    assert 0.7 < reads.median < 1.1, "LRFU reads less"
