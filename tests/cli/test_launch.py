"""The command `launch`: a server, a client of it, and the end of both."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from moepack.running.serving.clients import CLIENTS
from tests.support.children import MOEPACK, Piped, run_command, wait_until
from tests.support.models import FIXTURES
from tests.support.needs import needs_llama
from tests.support.servers import served
from tests.support.terminals import Terminal
from tests.support.warm_command import Run

MODEL = FIXTURES / "chat-00001-of-00002.gguf"
SMALL = ("--memory", "floor", "-t", "1")
QUESTION = "What is a pack?"
ANSWER = "A pack is a folder with all of a model."
PAGE = (FIXTURES.parent / "docs" / "agents.md").read_text()
DENSE = FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"
PROGRAM = f"""#!{sys.executable}
import json, os, sys, time, urllib.request
config = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
(provider,) = config["provider"].values()
url = provider["options"]["baseURL"]

def ask(path, fields=None):
    headers = {{"Authorization": "Bearer " + os.environ["MOEPACK_API_KEY"]}}
    headers["Content-Type"] = "application/json"
    data = None if fields is None else json.dumps(fields).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
        return json.load(answer)

exec(sys.argv[1])
"""
"""Stands for a client: it does what its first argument says."""
REPORT = f"""
answer = ask("/chat/completions", dict(
    model=config["model"], temperature=0,
    messages=[dict(role="user", content={QUESTION!r})]))
print(json.dumps(dict(
    answer=answer["choices"][0]["message"]["content"], words=sys.argv[2:], input=sys.stdin.read(),
    url=url, models=list(provider["models"].items()), served=ask("/models")["data"][0]["id"])))
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have a client in PATH, and temporary files in a folder, which is empty but for logs."""
    programs, folder = tmp_path / "programs", tmp_path / "temporary"
    programs.mkdir()
    folder.mkdir()
    program = programs / "opencode"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("MOEPACK_API_KEY", raising=False)
    yield folder
    assert all(path.suffix == ".log" for path in folder.glob("moepack-launch-*"))


def launch(*words: str | Path) -> Piped:
    """Start the command, with a client that does what the last word says."""
    *options, code = words
    return Piped(*MOEPACK, "launch", "opencode", MODEL, *SMALL, *options, "--", code, "-x", "a b")


def has_ended(url: str) -> bool:
    try:
        httpx.get(url.replace("/v1", "/health"))
    except httpx.ConnectError:
        return True
    except httpx.ReadError:  # it ends at this moment
        return False
    return False


@pytest.mark.long
@needs_llama
def test_a_client_talks_to_the_server_and_both_end(folder: Path) -> None:
    """It has the terminal's streams, its own arguments, and the exit code."""
    with launch("--name", "tiny", REPORT) as process:
        output, notes = process.communicate("typed")
    facts = json.loads(output)
    assert process.returncode == 7, notes
    assert facts["answer"].startswith(ANSWER)
    assert facts["words"] == ["-x", "a b"]
    assert facts["input"] == "typed"
    assert facts["served"] == "tiny"
    assert facts["models"] == [
        ["tiny", {"name": "tiny", "limit": {"context": 1024, "output": 1024}}]
    ]
    assert has_ended(facts["url"])
    (log,) = folder.glob("*.log")
    assert f"tiny with 1,024 tokens of context; log: {log}" in notes
    assert "note: opencode is meant for 65,536 tokens of context" in notes
    assert "experts: " in log.read_text()
    assert "lookups hit" not in notes


@pytest.mark.long
@needs_llama
def test_a_key_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
for server in open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split():
    print(open(f"/proc/{server}/cmdline").read())
    for program in open(f"/proc/{server}/task/{server}/children").read().split():
        print(open(f"/proc/{program}/cmdline").read())
urllib.request.urlopen(url.replace("/v1", "/props"))
"""
    monkeypatch.setenv("MOEPACK_API_KEY", "sesame-7")
    with launch("--api-key", "sesame-8", code) as process:
        output, notes = process.communicate()
    assert all(word in output for word in ("serve", "--alias"))
    assert "sesame" not in output
    assert "HTTP Error 401" in notes


@pytest.mark.long
@needs_llama
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_the_server_ends_however_the_command_ends(
    number: signal.Signals, code: int, folder: Path
) -> None:
    with launch("print(url, os.getpid(), flush=True); time.sleep(600)") as process:
        url, client = process.stdout.readline().split()
        assert not has_ended(url)
        process.send_signal(number)
        assert process.wait() == code
        wait_until(lambda: has_ended(url))
        if number is signal.SIGKILL:  # nobody was left to end it, and to remove its files
            os.kill(int(client), number)
            for path in folder.glob("moepack-launch-*"):
                path.unlink() if path.is_file() else shutil.rmtree(path)
        wait_until(lambda: not Path(f"/proc/{client}").exists())


@pytest.mark.long
@needs_llama
def test_ctrl_c_is_the_client_s_and_the_server_goes_on() -> None:
    code = """
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("served:", ask("/models")["data"][0]["id"])
"""
    words = ("launch", "opencode", str(MODEL), *SMALL, "--name", "tiny", "--", code)
    with Terminal(*MOEPACK, *words) as terminal:
        terminal.until("ready")
        terminal.type("\x03")
        terminal.until("served: tiny")
        assert terminal.process.wait() == 0


@pytest.mark.long
@needs_llama
def test_a_server_that_does_not_start_says_why() -> None:
    with Piped(*MOEPACK, "launch", "opencode", DENSE, "--", "print('started')") as process:
        output, notes = process.communicate()
    assert (process.returncode, output) == (3, "")
    assert "error: " in notes


@pytest.mark.long
@needs_llama
def test_a_server_that_ends_early_is_named(folder: Path) -> None:
    code = """
parent = os.getppid()
children = open(f"/proc/{parent}/task/{parent}/children").read().split()
(server,) = {int(child) for child in children} - {os.getpid()}
os.kill(server, 15)
while " Z " not in open(f"/proc/{server}/stat").read():
    time.sleep(0.01)
"""
    with launch(code) as process:
        _, notes = process.communicate()
    (log,) = folder.glob("*.log")
    assert "error: the server has ended" in notes
    assert str(log) in notes.splitlines()[-1]


def test_a_client_that_is_not_installed_is_named_with_the_line_that_installs_it(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name, client in CLIENTS.items():
        end = cli("launch", name, MODEL)
        assert end.returncode == 127
        assert end.stderr.splitlines() == [
            f"error: {client.program}: not installed, or in none of the folders of PATH",
            f"hint: {client.install}",
        ]


def test_a_dry_run_prints_all_and_starts_nothing(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the client nor the model has to be there; a key is not printed."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("MOEPACK_API_KEY", "sesame")
    words = ("--memory", "8GiB", "-c", "90000", "--dry-run", "--", "exec", "say hi")
    typed = cli("launch", "llm", "a.gguf", "--port", "99", "--dry-run").stdout
    assert "http://127.0.0.1:99/v1" in typed
    assert typed.count("--port") == 1
    end = cli("launch", "codex", "a.gguf", *words)
    server, client, variable = end.stdout.splitlines()
    assert server == ("server: moepack serve a.gguf --memory 8GiB -c 90000 --port 0 --name a.gguf")
    assert client.startswith("client: codex -c ")
    assert client.endswith(" exec 'say hi'")
    assert "http://127.0.0.1:PORT/v1" in client
    assert variable == 'variable: MOEPACK_API_KEY="$MOEPACK_API_KEY"'
    assert "sesame" not in end.stdout
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("name", CLIENTS)
def test_a_context_is_wanted_for_each_client_unless_one_is_typed(cli: Run, name: str) -> None:
    wanted = f" --wanted-context {CLIENTS[name].context}"
    for words in ((), ("-c", "9000"), ("--wanted-context", "7")):
        server = cli("launch", name, MODEL, *words, "--dry-run").stdout.splitlines()[0]
        assert server.endswith(wanted) == (not words)


def test_the_model_may_be_named_as_in_llama_cpp(cli: Run) -> None:
    end = cli("launch", "llm", "-m", MODEL, "--dry-run")
    assert f"LLM_MODEL={MODEL.name}" in end.stdout


def test_the_log_is_text_in_which_the_address_is_found(cli: Run) -> None:
    done = cli("launch", "llm", "model.gguf", "--log-format", "json", "--dry-run")
    assert (done.returncode, "--log-format" in done.stderr) == (2, True)


@pytest.mark.long
@needs_llama
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llm", ["--no-stream", "-o", "temperature", "0", QUESTION]),
        ("aider", ["--no-git", "--no-stream", "--yes", "--no-check-update", "--message", QUESTION]),
    ],
)
def test_real_clients_get_an_answer(name: str, words: list[str], tmp_path: Path) -> None:
    """With a home of their own, in which their users' files would be."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    home = tmp_path / "home"
    home.mkdir()
    variables = {**os.environ, "HOME": str(home), "MOEPACK_API_KEY": "sesame"}
    for shard in FIXTURES.glob("chat-*.gguf"):
        data = bytearray(shard.read_bytes())
        if (place := data.find(b"qwen3moe.context_length")) >= 0:
            value = place + len("qwen3moe.context_length") + 4
            data[value : value + 4] = (65536).to_bytes(4, "little")
        (tmp_path / shard.name).write_bytes(data)
    command = (*MOEPACK, "launch", name, tmp_path / MODEL.name, *SMALL, "--", *words)
    end = run_command(*command, env=variables, cwd=home)
    assert end.returncode == 0, end.stderr
    assert "A pack is a folder" in end.stdout or "I do not know" in end.stdout


def test_the_page_on_agents_has_a_line_for_each_client_that_would_start(cli: Run) -> None:
    lines = re.findall("^    moepack (launch .+)$", PAGE, re.MULTILINE)
    started = set()
    for line in lines:
        words = [str(MODEL) if word == "model.gguf" else word for word in shlex.split(line)]
        mine = words[words.index("--") :] if "--" in words else []
        end = cli(*words[: len(words) - len(mine)], "--dry-run", *mine)
        assert end.returncode == 0, end.stderr
        assert end.stdout.splitlines()[1].endswith(shlex.join(mine[1:]))
        started.add(words[1])
    assert started == CLIENTS.keys()


@pytest.mark.long
@needs_llama
def test_the_page_on_agents_has_requests_and_programs_that_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = re.findall("^    (curl .+)$", PAGE, re.MULTILINE)
    programs = re.findall("```python\n(.*?)```", PAGE, re.DOTALL)
    assert (len(calls), len(programs)) == (3, 1)
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    with served(MODEL, *SMALL, "--name", "local") as (_, url):
        for call in calls:
            end = run_command(*shlex.split(call.replace("http://127.0.0.1:8080", url)))
            text = "".join(re.findall(r'"(?:content|text|delta)":"([^"]*)"', end.stdout))
            assert "pack" in text, end.stdout
        if not (find_spec("openai") and find_spec("anthropic")):  # importing takes seconds
            pytest.skip("a client's library is not installed")
        row = re.findall(r"`(OPENAI|ANTHROPIC)_(BASE_URL|API_KEY)=([^`]+)`", PAGE)
        variables = {f"{one}_{two}": value for one, two, value in row}
        assert len(variables) == 4
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("http://127.0.0.1:8080", url))
        exec(programs[0], {})  # here, since its libraries take seconds to load
        assert capsys.readouterr().out.count("\n") >= 2


def test_settings_on_the_page_on_agents_are_json() -> None:
    (text,) = re.findall("```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(text)["language_models"]["openai_compatible"]["moepack"]["api_url"]
