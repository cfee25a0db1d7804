"""The clients that `launch` starts, with the settings by which each uses its server.

Names and meanings are those of their documents, and of the versions that were tried: Claude Code
2.1.197, Codex 0.171.0, OpenCode 1.18.33, aider 0.86.2, llm 0.36; of Open WebUI 0.12.4 the source
was read. Time limits are a day: a prompt of an agent may take hours, in which comments of a stream
are no events for a client.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_DAY = 24 * 60 * 60
_SHARE_OF_ANSWERS = 8
_LEAST_ANSWER, _MOST_ANSWER = 1024, 32_000


class Endpoint(NamedTuple):
    """A server as its client sees it.

    `context` is the tokens of a text, `folder` is where the client's `files` will be. `key` is any
    text if the server asks for none: clients need one.
    """

    url: str
    model: str
    key: str
    context: int
    folder: Path

    @property
    def openai_url(self) -> str:
        """The address for clients of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def answer(self) -> int:
        """The tokens of an answer at most: a share of the context, of which the prompt has most."""
        return min(_MOST_ANSWER, max(_LEAST_ANSWER, self.context // _SHARE_OF_ANSWERS))


class Settings(NamedTuple):
    """Settings by which a client uses a server: `arguments` precede those of its user.

    `files` have names in the endpoint's folder, and texts.
    """

    variables: Mapping[str, str]
    arguments: Sequence[str] = ()
    files: Mapping[str, str] = {}


class Client(NamedTuple):
    """A client: its `program`, the line that installs it, and the context that it needs.

    The first prompt of an agent may have more than half of that.
    """

    program: str
    install: str
    settings: Callable[[Endpoint], Settings]
    context: int = 1 << 16


def _claude(server: Endpoint) -> Settings:
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys(_OTHER_SERVICES, ""),
        **dict.fromkeys(_CLAUDE_MODELS, server.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.answer),
        "CLAUDE_CODE_MAX_TOOL_USE_CONCURRENCY": "1",  # else subagents take each other's turns
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes the beginning of each prompt
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(_DAY * 1000),
        "API_FORCE_IDLE_TIMEOUT": "0",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_DAY * 1000),
    }
    # The settings of its user win over variables, and these over them.
    name = "claude-settings.json"
    arguments = ["--settings", str(server.folder / name)]
    return Settings(variables, arguments, {name: _json({"env": variables})})


_CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
_OTHER_SERVICES = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CODE_USE_FOUNDRY",
)
_KEY = "MOEPACK_API_KEY"
"""The variable for the key, where a client lets its name be chosen."""


def _codex(server: Endpoint) -> Settings:
    provider = {
        "name": "moepack",
        "base_url": server.openai_url,
        "env_key": _KEY,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _DAY * 1000,
    }
    values = {
        "model": server.model,
        "model_provider": "moepack",
        "model_context_window": server.context,
        **{f"model_providers.moepack.{name}": value for name, value in provider.items()},
    }
    # A text of JSON is one of TOML.
    words = [word for name, value in values.items() for word in ("-c", f"{name}={_json(value)}")]
    return Settings({_KEY: server.key}, words)


def _opencode(server: Endpoint) -> Settings:
    limits = dict.fromkeys(("timeout", "headerTimeout", "chunkTimeout"), False)
    options = {"baseURL": server.openai_url, "apiKey": f"{{env:{_KEY}}}", **limits}
    limit = {"context": server.context, "output": server.answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "moepack",
        "options": options,
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    model = f"moepack/{server.model}"
    config = {"model": model, "small_model": model, "provider": {"moepack": provider}}
    return Settings({_KEY: server.key, "OPENCODE_CONFIG_CONTENT": _json(config)})


def _aider(server: Endpoint) -> Settings:
    model, name = f"openai/{server.model}", "aider-models.json"
    facts = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": server.context,
        "max_output_tokens": server.answer,
        "max_tokens": server.answer,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    variables = {
        "AIDER_OPENAI_API_BASE": server.openai_url,
        "AIDER_OPENAI_API_KEY": server.key,
        "AIDER_MODEL": model,
        "AIDER_WEAK_MODEL": model,
        "AIDER_MODEL_METADATA_FILE": str(server.folder / name),
        "AIDER_TIMEOUT": str(_DAY),
    }
    return Settings(variables, files={name: _json({model: facts})})


def _llm(server: Endpoint) -> Settings:
    model = {
        "model_id": server.model,
        "model_name": server.model,
        "api_base": server.openai_url,
        "api_key_name": "moepack",  # which its folder lacks: then the variable has it
        "supports_tools": True,
        "supports_schema": True,
    }
    variables = {
        "LLM_USER_PATH": str(server.folder),
        "LLM_MODEL": server.model,
        "OPENAI_API_KEY": server.key,
    }
    # A text of JSON is one of YAML.
    return Settings(variables, files={"extra-openai-models.yaml": _json([model])})


def _open_webui(server: Endpoint) -> Settings:
    variables = {
        "OPENAI_API_BASE_URLS": server.openai_url,
        "OPENAI_API_KEYS": server.key,
        "DEFAULT_MODELS": server.model,
        "ENABLE_PERSISTENT_CONFIG": "False",  # else what it stored wins over variables
        "ENABLE_OLLAMA_API": "False",
        # Each would be a text of its own after every answer.
        "ENABLE_FOLLOW_UP_GENERATION": "False",
        "ENABLE_TAGS_GENERATION": "False",
        "AIOHTTP_CLIENT_TIMEOUT": "",
    }
    return Settings(variables, ["serve", "--host", "127.0.0.1"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


CLIENTS: Mapping[str, Client] = {
    "claude": Client("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Client("codex", "npm install -g @openai/codex", _codex),
    "opencode": Client("opencode", "npm install -g opencode-ai", _opencode),
    "aider": Client("aider", "pipx install aider-chat", _aider),
    "llm": Client("llm", "pipx install llm", _llm, 1 << 14),
    "open-webui": Client("open-webui", "pipx install open-webui", _open_webui, 1 << 14),
}
"""The clients by name."""
