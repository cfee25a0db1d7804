"""A llama-server that is installed, behind the gate: PyPI's for Vulkan, and ours as one."""

import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from moepack.common.errors import MoepackError
from moepack.running.programs.command import CONTEXT, THREADS, without
from moepack.running.serving.installed_server import GateOptions, read_gate_options
from moepack.running.serving.model_server import ServerProcess
from moepack.running.streaming.control import Control
from tests.support.children import PATIENCE, Piped, wait_until
from tests.support.installed_servers import our_server, require_vulkan_server
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_llama
from tests.support.servers import OPTIONS
from tests.support.supervised import supervised

MODEL = FIXTURES / "chat-00001-of-00002.gguf"
BODY = {"prompt": "Once upon a time there was", "n_predict": 8, "temperature": 0}
Installed = tuple[Path, dict[str, str]]
"""A program, and variables for it."""


@pytest.fixture(scope="module", params=["ours", "vulkan"])
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """Return a llama-server whose layers are on processors: most prompts crash lavapipe."""
    if request.param == "ours":
        return our_server(tmp_path_factory.mktemp("installed")), {}
    program, names = require_vulkan_server()
    return program, names | {"LLAMA_ARG_N_GPU_LAYERS": "0"}


@needs_llama
def test_layers_are_on_the_gpu_and_experts_on_the_processor() -> None:
    """As is said when the model is loaded; of each text a token, for lavapipe crashes at more."""
    program, names = require_vulkan_server()
    options = [*OPTIONS, "-lv", "4"]
    start: Any = {"options": options, "program": program, "environment": names}
    with ServerProcess(str(MODEL), **start) as server:
        body = BODY | {"prompt": "Hello"}
        answer = httpx.post(f"{server.url}/completion", json=body, timeout=PATIENCE)
        assert answer.json()["tokens_predicted"] > 0
        log = server.log()
    assert re.search(r"offloaded (\d+)/\1 layers to GPU", log), log
    assert "tensor overrides to CPU are used" in log


def answer_alone(program: Path, names: dict[str, str], model: Path, folder: Path) -> Any:
    """Ask the program without moepack; it listens on a socket too."""
    path = str(folder / "alone.sock")
    command = [program, "-m", model, "--host", path, *OPTIONS, "--no-repack"]
    with Piped(*command, "--fit", "off", env=os.environ | names) as process:
        try:
            wait_until(lambda: is_loaded(path))
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=PATIENCE) as client:
                return client.post("http://localhost/completion", json=BODY).json()["content"]
        finally:
            process.kill()


def is_loaded(path: str) -> bool:
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            return client.get("http://localhost/health").status_code == 200
    except httpx.TransportError:
        return False


@needs_llama
def test_it_answers_as_alone_behind_the_gate(installed: Installed, tmp_path: Path) -> None:
    program, names = installed
    options: Any = {"options": [*OPTIONS, "--alias", "tiny"], "program": program}
    with ServerProcess(str(MODEL), **options, environment=names, api_key="sesame") as server:
        key = {"Authorization": "Bearer sesame"}
        url = f"{server.url}/completion"
        answer = httpx.post(url, json=BODY, headers=key, timeout=PATIENCE)
        assert answer.json()["content"] == answer_alone(program, names, MODEL, tmp_path)
        assert httpx.post(url, json=BODY).status_code == 401
        page = {"Origin": "https://evil.example"}
        assert httpx.post(url, json=BODY, headers=key | page).status_code == 403
        own = {"Origin": "http://localhost:3000"}
        allowed = httpx.get(f"{server.url}/v1/models", headers=key | own)
        assert allowed.headers.get_list("access-control-allow-origin") == [own["Origin"]]
        assert allowed.json()["data"][0]["id"] == "tiny"


@needs_llama
def test_only_this_user_reaches_it_and_nothing_is_left(
    installed: Installed, tmp_path: Path
) -> None:
    program, names = installed
    names = names | {"TMPDIR": str(tmp_path)}
    start: Any = {"options": OPTIONS, "program": program, "environment": names}
    with ServerProcess(str(MODEL), **start) as server:
        assert server.url
        (folder,) = (path for path in tmp_path.iterdir() if path.name.startswith("moepack-"))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (child,) = children_of(server.process_id)
        assert not listening_ports(child) - listening_ports(server.process_id)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("moepack-")]
    assert not Path(f"/proc/{child}").exists()


def children_of(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def listening_ports(process: int) -> set[str]:
    """Return the addresses of TCP at which a process itself listens."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
        except OSError:  # closed meanwhile
            continue
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in own}


@needs_llama
def test_its_end_is_the_server_s_end(installed: Installed) -> None:
    program, names = installed
    start: Any = {"options": OPTIONS, "program": program, "environment": names}
    with ServerProcess(str(MODEL), **start) as server:
        assert server.url
        os.kill(children_of(server.process_id)[0], signal.SIGKILL)
        wait_until(lambda: not server.is_running)
        assert "llama-server: ended by SIGKILL" in (server.problem() or "")


@needs_llama
def test_what_it_refuses_is_said(installed: Installed) -> None:
    program, names = installed
    start: Any = {"program": program, "environment": names}
    server = ServerProcess(str(MODEL), options=["--no-such-option"], **start)
    with server, pytest.raises(MoepackError, match="--no-such-option"):
        assert server.url


def test_the_gate_reads_options_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", "x", "--host", "127.0.0.1, a.sock", "--port=9", "-np", "3", "-c", "512"]
    words += ["--cors-origins", "*", "--api-key", "k", "--ssl-key-file", "p"]
    hosts = ["127.0.0.1", "a.sock"]
    expected = GateOptions(hosts, 9, False, "*", True, "p", "", 3, 512, False, 10)
    assert read_gate_options(words) == expected
    assert read_gate_options([]) == GateOptions()
    monkeypatch.setenv("LLAMA_ARG_PORT", "0")
    monkeypatch.setenv("LLAMA_API_KEY", "")
    monkeypatch.setenv("LLAMA_ARG_MMPROJ", "y")
    assert read_gate_options(["--reuse-port"]) == GateOptions(
        port=0, shares_port=True, has_media=True
    )


def test_options_are_left_out_with_their_values() -> None:
    words = ["-c", "1", "--ctx-size=2", "-t", "3", "x", "--threads"]
    assert without(words, [CONTEXT]) == ["-t", "3", "x", "--threads"]
    assert without(words, [CONTEXT, THREADS]) == ["x"]


@needs_llama
def test_another_process_reads_what_programs_have_counted() -> None:
    """As the gate does, which decides by it how many texts are computed at once."""
    model = first_shard("qwen3moe")
    with supervised(model, memory="floor") as run, run.program() as program:
        assert program.ask([7])
        control = Control(run.supervisor.environment["MOEPACK_CONTROL"])
        try:
            (statistics,) = control.statistics()
            assert statistics.miss_count == run.supervisor.usage.miss_count > 0
        finally:
            control.close()
