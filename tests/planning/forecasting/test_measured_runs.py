"""Measured runs: which files are valid, and which of their fields are used."""

import json
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import RequestError
from moepack.planning.forecasting.measured_runs import MeasuredRun, read_runs

NOW: dict[str, Any] = {
    "cpu_info": "CPU",
    "gpu_info": "NVIDIA GeForce RTX 3090",
    "backends": "CUDA",
    "model_size": 18_550_000_000,
    "n_gpu_layers": 99,
    "n_cpu_moe": 24,
    "tensor_buft_overrides": "none",
    "n_prompt": 0,
    "n_gen": 128,
    "n_depth": 512,
    "avg_ts": 41.9,
}
RUN: dict[str, Any] = {
    "model_length": 18_550_000_000,
    "step_count": 99,
    "seconds": 9.9,
    "read_length": 990,
    "read_seconds": 4.95,
    "misses": 100,
    "prompt_count": 10,
    "memory": {"experts": 1},
}


def write(path: Path, body: Any) -> str:
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return str(path)


def only(path: Path, body: Any) -> MeasuredRun:
    (run,) = read_runs([write(path / "receipt.json", body)])
    return run


def test_an_array_as_llama_bench_writes_it(tmp_path: Path) -> None:
    prompt = {**NOW, "n_prompt": 512, "n_gen": 0}
    run = only(tmp_path, [prompt, NOW])
    assert (run.kind, run.tokens_per_second, run.depth) == ("offload", 41.9, 576)
    assert run.model_length == 18_550_000_000
    assert (run.cpu_layer_count, run.gpu_layer_count) == (24, 99)
    assert run.place == "entry 2"
    assert {"avg_ts", "n_cpu_moe", "model_size"} <= set(run.fields)
    assert "cpu_info" not in run.fields


def test_a_prompt_beside_it_says_how_fast_the_same_way_computes(tmp_path: Path) -> None:
    prompt = {**NOW, "n_prompt": 512, "n_gen": 0, "avg_ts": 400.0}
    whole = {**NOW, "n_cpu_moe": 0}
    runs = read_runs([write(tmp_path / "bench.json", [prompt, NOW, whole])])
    assert [one.prompt_seconds for one in runs] == [1 / 400, None]
    ours = {**RUN, "prompt": {"step_count": 200, "seconds": 4.0, "read_seconds": 1.0}}
    assert only(tmp_path, ours).prompt_seconds == 3.0 / 200
    assert only(tmp_path, RUN).prompt_seconds is None


def test_an_object_in_each_line(tmp_path: Path) -> None:
    lines = f"{json.dumps(NOW)}\n\n{json.dumps({**NOW, 'n_cpu_moe': 0})}\n"
    runs = read_runs([write(tmp_path / "bench.jsonl", lines)])
    assert [(one.place, one.kind) for one in runs] == [("line 1", "offload"), ("line 3", "gpu")]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"n_cpu_moe": 0}, "gpu"),
        ({"n_gpu_layers": 0}, "cpu"),
        ({"n_gpu_layers": -1}, "offload"),
        ({"backends": "CPU"}, "cpu"),
        ({"backends": "Vulkan,RPC"}, "offload"),
        ({"n_cpu_moe": 0, "tensor_buft_overrides": "exps=CPU"}, "offload"),
        ({"n_cpu_moe": 0, "tensor_buft_overrides": "exps=CUDA1"}, "gpu"),
    ],
)
def test_how_it_ran(tmp_path: Path, change: dict[str, Any], kind: str) -> None:
    assert only(tmp_path, [{**NOW, **change}]).kind == kind


def test_which_layers_were_in_memory(tmp_path: Path) -> None:
    run = only(tmp_path, [{**NOW, "n_cpu_moe": 2}])
    assert [run.keeps_in_memory(layer) for layer in range(4)] == [True, True, False, False]
    pattern = r"blk\.(1|3)\.ffn_.*_exps=CPU;output=CUDA0"
    run = only(tmp_path, [{**NOW, "n_cpu_moe": 0, "tensor_buft_overrides": pattern}])
    assert [run.keeps_in_memory(layer) for layer in range(4)] == [False, True, False, True]


def test_a_cache_of_experts_says_too_little(tmp_path: Path) -> None:
    assert only(tmp_path, [{**NOW, "moe_cache": 4096}]).exclusion is not None
    assert only(tmp_path, [{**NOW, "moe_cache": 0}]).exclusion is None
    assert only(tmp_path, RUN).exclusion is None


def test_our_own(tmp_path: Path) -> None:
    run = only(tmp_path, RUN)
    assert (run.kind, run.tokens_per_second) == ("stream", 10)
    assert (run.read_length, run.read_seconds) == (10, 0.05)
    assert run.depth == 59.5


BROKEN: dict[str, tuple[Any, str]] = {
    "empty": ("", "empty"),
    "no JSON": ("tok/s: 12\n", "line 1: not JSON"),
    "depths of brackets": ("[" * 100_000, "line 1: not JSON"),
    "a line": (json.dumps(NOW) + "\n{", "line 2: not JSON"),
    "another tool's": ([{"throughput": 12}], "entry 1: not a receipt"),
    "prompts alone": ([{**NOW, "n_prompt": 512, "n_gen": 0}], "no test that generates tokens"),
    "no model": ([{**NOW, "model_size": None}], "model_size: .*does not name its model"),
    "no speed": ([{**NOW, "avg_ts": None}], "avg_ts: not a possible speed"),
    "NaN": ('[{"n_gen": 1, "model_size": 9, "avg_ts": NaN}]', "avg_ts: not a possible number"),
    "pattern": ([{**NOW, "tensor_buft_overrides": "(=CPU"}], "not a pattern, found \\("),
    "faster than any": ([{**NOW, "avg_ts": 1e9}], "avg_ts: not a possible speed.*1e\\+09 tok/s"),
    "our own, backwards": ({**RUN, "seconds": -1}, "seconds: less than 0"),
    "our own, one token": ({**RUN, "step_count": 0}, "too short to be a receipt"),
    "our own, always waiting": (
        {**RUN, "read_seconds": 12},
        "entry 1: read_seconds: .* waited longer .* up to 9.9 s, as `seconds` says, found 12 s",
    ),
}


@pytest.mark.parametrize(("body", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_none_is_refused(tmp_path: Path, body: Any, message: str) -> None:
    path = write(tmp_path / "receipt.json", body)
    with pytest.raises(RequestError, match=message) as caught:
        read_runs([path])
    assert caught.value.path == path
    is_told = caught.value.hint == "llama-bench writes Markdown without -o json"
    assert is_told == ("not JSON" in message)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read: No such file"):
        read_runs([str(tmp_path / "none.json")])
