"""A server that one can watch: its log, its metrics, and the list of servers."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.children import MOEPACK, PATIENCE, Piped, run_command, wait_until
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.servers import served

pytestmark = [pytest.mark.long, needs_llama]
SHARD = first_shard("qwen3moe")
SMALL = ("--memory", "floor", "-c", "512", "-t", "1")
SECRET = "open sesame"
MESSAGES = [{"role": "user", "content": SECRET}]
CHAT = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
TEXTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": SECRET, "max_output_tokens": 6, "temperature": 0},
    "/completion": {"prompt": SECRET, "n_predict": 6, "temperature": 0},
    "/v1/completions": {"prompt": SECRET, "max_tokens": 6, "temperature": 0},
}
"""Requests for texts by their paths."""
DOCUMENTS = Path(__file__).parents[2] / "docs"
OPERATE = (DOCUMENTS / "operate.md").read_text()


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers listed where no other test looks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def events(process: Piped) -> list[dict[str, Any]]:
    """End a server, and return all that it logged."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert process.stdout.read() == ""
    return [json.loads(line) for line in process.stderr]


def json_server(*options: str) -> tuple[Piped, str, list[dict[str, Any]]]:
    """Serve a model with a log in JSON; return the process, its address, and events so far."""
    process = Piped(
        *MOEPACK, "serve", SHARD, *SMALL, "--port", "0", "--log-format", "json", *options
    )
    early: list[dict[str, Any]] = []
    while not early or early[-1]["event"] != "listening":
        early.append(json.loads(process.stderr.readline()))
    return process, early[-1]["url"], early


def test_each_request_is_an_event_with_the_figures_of_its_answer_and_none_of_its_text() -> None:
    process, url, early = json_server()
    try:
        assert [event["event"] for event in early] == ["note", "start", "listening"]
        model = early[1]["model"]
        assert (model["name"], model["context"], model["text_count"]) == (SHARD.name, 512, 4)
        assert model["length"] > 1 << 20
        assert early[2]["clients_url"] == f"{url}/v1"
        assert httpx.get(early[2]["page_url"]).status_code == 200
        with httpx.Client(base_url=url, timeout=PATIENCE, params={"key": "sesame"}) as client:
            for is_stream in (False, True):
                for path, body in TEXTS.items():
                    client.post(path, json={**body, "stream": is_stream})
            client.post("/completion", content=b'{"prompt": "open sesame')
            client.get("/health", headers={"Host": "evil.example"})
        page, *texts, wrong, refused = (one for one in events(process) if one["event"] == "request")
    finally:
        process.kill()
    assert (page["path"], page["status"], page["prompt_count"]) == ("/", 200, None)
    assert [text["path"] for text in texts] == [*TEXTS] * 2
    for number, text in enumerate(texts):
        assert (text["status"], text["token_count"], text["has_left"]) == (200, 6, False)
        assert text["prompt_count"] > text["kept_count"] >= 0
        assert 0 <= text["hit_rate"] < 1
        assert 0 <= text["waited_seconds"] <= text["seconds"] < PATIENCE
        has_speed = number >= len(TEXTS) or text["path"] not in ("/v1/messages", "/v1/responses")
        assert (text["tokens_per_second"] is not None) == has_speed
        assert (text["prompt_tokens_per_second"] is not None) == has_speed
    assert (wrong["status"], wrong["reason"]) == (400, "invalid_request_error")
    assert refused["status"] == 403
    assert "evil.example" in refused["reason"]
    assert "sesame" not in json.dumps([texts, wrong, refused])
    names = {name for event in (*early, refused) for name in (event["event"], *event)}
    names |= {*model, *early[1]["memory"]}
    assert not [name for name in names if f"`{name}`" not in OPERATE]


def test_the_log_for_people_begins_with_the_model_and_has_a_line_for_each_request() -> None:
    with served(SHARD, *SMALL) as (process, url):
        assert process.stdout.readline() == (
            f"address for clients: {url}/v1; page for browsers: {url}/\n"
        )
        httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=PATIENCE)
        httpx.post(f"{url}/completion", content=b'{"prompt": "open sesame')
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
    lines = log.splitlines()
    model = next(line for line in lines if line.startswith("model: "))
    assert model.startswith(
        f"model: {SHARD.name}, Q4_K, 1.3 MiB; a context of 512 tokens, up to 4 "
    )
    text = next(line for line in lines if "POST /v1/chat/completions 200 in " in line)
    assert "; answer 6 tokens, " in text
    assert "hits, waited 0.0" in text
    assert any(line.endswith("s: invalid_request_error") for line in lines)
    assert "sesame" not in log, "llama.cpp's own warnings quote requests"


@pytest.mark.parametrize(("option", "is_said"), [("-v", True), ("-q", False)])
def test_more_or_less_is_said(option: str, is_said: bool) -> None:
    """With -v by llama.cpp as well; with -q neither requests nor the model."""
    with served(SHARD, *SMALL, option) as (process, url):
        httpx.get(f"{url}/health")
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
    for words in ("srv    load_model:", "options of llama-server: ", "GET /health 200", "model: "):
        assert (words in log) == is_said


def check_metrics(text: str) -> dict[str, float]:
    """Return the values of metrics by their names and labels, as Prometheus's own parser reads."""
    parser = pytest.importorskip("prometheus_client.parser")
    values = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.type in ("counter", "gauge")
        assert family.documentation
        for sample in family.samples:
            assert math.isfinite(sample.value)
            labels = ",".join(map(str, sample.labels.values()))
            values[f"{sample.name}{labels and f'[{labels}]'}"] = sample.value
    return values


@pytest.mark.parametrize("has_theirs", [False, True])
def test_metrics_are_behind_the_key_and_count_what_was_done(
    has_theirs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With llama.cpp's own among them where these are switched on."""
    monkeypatch.setenv("MOEPACK_API_KEY", "sesame")
    headers = {"Authorization": "Bearer sesame"}
    with served(SHARD, *SMALL, *(["--", "--metrics"] * has_theirs)) as (_, url):
        assert httpx.get(f"{url}/metrics").status_code == 401
        with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as client:
            before = check_metrics(client.get("/metrics").text)
            tokens = client.post("/v1/chat/completions", json=CHAT).json()["usage"]
            answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    after = check_metrics(answer.text)
    assert any(name.startswith("llamacpp:") for name in after) == has_theirs
    assert before["moepack_requests_total[401]"] == after["moepack_requests_total[401]"] == 1
    assert after["moepack_requests_total[200]"] == 2
    assert after["moepack_requests_open"] == 1
    assert after["moepack_prompt_tokens_total"] == tokens["prompt_tokens"]
    assert after["moepack_answer_tokens_total"] == 6
    assert after["moepack_answer_seconds_total"] > 0
    for name in ("hits", "misses", "evictions", "read_bytes", "wait_seconds"):
        assert after[f"moepack_experts_{name}_total"] > before[f"moepack_experts_{name}_total"]
    assert after["moepack_experts_faults_total"] == 0
    assert 0 < after["moepack_experts_resident_bytes"] <= after["moepack_experts_budget_bytes"]
    assert after["moepack_experts_all_resident"] == 0
    ours = {name.partition("[")[0] for name in after if not name.startswith("llamacpp:")}
    assert not [name for name in ours if f"`{name}`" not in OPERATE]


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Return the folder of the files of servers."""
    return tmp_path / "state" / "moepack" / "servers"


def listed_servers() -> list[dict[str, Any]]:
    run = run_command(*MOEPACK, "ps", "--json")
    assert run.returncode == 0, run.stderr
    servers: list[dict[str, Any]] = json.loads(run.stdout)["servers"]
    return servers


def test_servers_are_listed_while_they_run(listed: Path) -> None:
    assert run_command(*MOEPACK, "ps").stdout == "no server is running\n"
    with served(SHARD, *SMALL, "--name", "first") as (process, url):
        with served(SHARD, *SMALL, "--name", "second", "-q"):
            httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=PATIENCE)
            wait_until(lambda: listed_servers()[0]["requests"])
            first, second = listed_servers()
            table = run_command(*MOEPACK, "ps").stdout.splitlines()
        assert (first["name"], second["name"]) == ("first", "second")
        assert first["url"] == url
        assert first["tokens"] == 6
        assert first["tokens_per_second"] > 0
        assert 0 < first["hit_rate"] < 1
        assert 0 < first["resident_length"] <= first["budget"]
        assert (second["tokens_per_second"], second["requests"]) == (None, 0)
        page = (DOCUMENTS / "commands" / "ps.md").read_text()
        assert not [name for name in first if f"`{name}`" not in page]
        assert len(table) == 3
        assert table[1].split()[:3] == [str(first["process"]), "first", url]
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in listed.iterdir())
        wait_until(lambda: len(listed_servers()) == 1)
        os.kill(first["process"], signal.SIGKILL)
        process.wait(PATIENCE)
        assert len([*listed.iterdir()]) == 1
        assert not listed_servers()
        assert not [*listed.iterdir()], "what is left over is removed"


def test_a_file_is_not_believed_though_its_process_runs(listed: Path) -> None:
    """As of a server that is gone, whose number another process has got."""
    listed.mkdir(parents=True)
    facts = {"process": os.getpid(), "began": 1.0}
    (listed / f"{os.getpid()}-0.json").write_text(json.dumps(facts))
    assert not listed_servers()
