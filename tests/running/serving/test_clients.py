"""The settings by which each client uses a server: variables, arguments and files."""

import json
from pathlib import Path
from typing import Any

import pytest

from moepack.running.serving.clients import CLIENTS, Endpoint, Settings

URL, MODEL, KEY, CONTEXT = "http://127.0.0.1:4321", "model.gguf", "sesame", 70_000
FOLDER = Path("/tmp/folder")
ENDPOINT = Endpoint(URL, MODEL, KEY, CONTEXT, FOLDER)


def settings(name: str) -> Settings:
    return CLIENTS[name].settings(ENDPOINT)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_key_is_no_argument_and_no_file_lies_elsewhere(name: str) -> None:
    """Arguments are seen by the other users of a machine."""
    found = settings(name)
    assert KEY not in " ".join(found.arguments)
    assert KEY in found.variables.values()
    assert all(Path(file).name == file for file in found.files)
    paths = [word for word in (*found.arguments, *found.variables.values()) if word[:1] == "/"]
    assert {path for path in paths if path != str(FOLDER)} <= {f"{FOLDER}/{f}" for f in found.files}


@pytest.mark.parametrize("name", CLIENTS)
def test_an_address_and_a_model_are_set_for_each(name: str) -> None:
    found = settings(name)
    text = " ".join((*found.arguments, *found.variables.values(), *found.files.values()))
    assert URL in text
    assert MODEL in text


def test_claude_has_the_model_for_all_of_its_names_and_the_context() -> None:
    """In a file too, since the settings of its user would win over variables."""
    found = settings("claude")
    variables = found.variables
    assert variables["ANTHROPIC_BASE_URL"] == URL
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert variables["ANTHROPIC_API_KEY"] == ""
    models = {name for name, value in variables.items() if value == MODEL}
    assert models >= {f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")}
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(CONTEXT)
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert int(variables["API_TIMEOUT_MS"]) > 3_600_000
    option, path = found.arguments
    assert (option, json.loads(found.files[Path(path).name])) == ("--settings", {"env": variables})


def test_codex_has_a_provider_with_the_variable_of_the_key() -> None:
    found = settings("codex")
    assert found.arguments[::2] == ["-c"] * 8
    values: dict[str, Any] = {}
    for word in found.arguments[1::2]:
        name, _, value = word.partition("=")
        values[name] = json.loads(value)
    assert values["model"] == MODEL
    assert values["model_context_window"] == CONTEXT
    provider = f"model_providers.{values['model_provider']}"
    assert values[f"{provider}.base_url"] == f"{URL}/v1"
    assert values[f"{provider}.wire_api"] == "responses"
    assert values[f"{provider}.stream_idle_timeout_ms"] > 3_600_000
    assert found.variables == {values[f"{provider}.env_key"]: KEY}


def test_opencode_has_a_provider_without_time_limits() -> None:
    found = settings("opencode")
    config = json.loads(found.variables["OPENCODE_CONFIG_CONTENT"])
    name, _, model = config["model"].partition("/")
    provider = config["provider"][name]
    assert config["small_model"] == config["model"]
    assert provider["models"][model]["limit"] == {"context": CONTEXT, "output": CONTEXT // 8}
    options = provider["options"]
    assert options["baseURL"] == f"{URL}/v1"
    assert found.variables[options["apiKey"].removeprefix("{env:").removesuffix("}")] == KEY
    assert options["timeout"] is options["headerTimeout"] is options["chunkTimeout"] is False


def test_an_answer_leaves_most_of_a_context_to_the_prompt() -> None:
    answers = [ENDPOINT._replace(context=length).answer for length in (2048, 1 << 16, 1 << 20)]
    assert answers == [1024, 8192, 32_000]
