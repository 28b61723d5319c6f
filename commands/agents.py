"""Builds the environment, arguments and files that make each coding agent use a gateway. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: The largest limit of answer tokens that an agent is configured with.
_MOST_ANSWERED: Final = 32_000
#: Contexts below this are small: an agent's own prompt fills most of such a context.
_SMALL_CONTEXT: Final = 32_768
#: pi compacts a conversation when fewer tokens than this are left of its configured context.
_PI_RESERVE: Final = 16_384


class GatewayAccess(NamedTuple):
    """A gateway, and the model that an agent uses there."""

    #: The URL without a path.
    url: str
    #: The API key.
    key: str
    model: str
    context_tokens: int
    #: Whether the model sees images.
    sees: bool = False

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI's client libraries."""
        return f"{self.url}/v1"

    @property
    def inputs(self) -> list[str]:
        """What the model takes. Agents send no image to a model that takes only text."""
        return ["text", "image"] if self.sees else ["text"]

    @property
    def answer_tokens(self) -> int:
        """The limit of answer tokens to configure in an agent; leaves room for the conversation.

        The share of a small context is smaller: small models often write up to the limit, and agents retry.
        """
        share = 16 if self.context_tokens < _SMALL_CONTEXT else 4
        return min(self.context_tokens // share, _MOST_ANSWERED)


class Start(NamedTuple):
    """How to start an agent."""

    #: Environment variables to add.
    environment: Mapping[str, str]
    #: Arguments to put before the user's; `{folder}` in one stands for the folder of `files`.
    arguments: tuple[str, ...] = ()
    #: Files to write, as texts by name.
    files: Mapping[str, str] = {}


def _claude(door: GatewayAccess) -> Start:
    models = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    return Start(
        {f"ANTHROPIC_{name}": door.model for name in models}
        | {
            "ANTHROPIC_BASE_URL": door.url,
            "ANTHROPIC_AUTH_TOKEN": door.key,
            "ANTHROPIC_API_KEY": "",  # otherwise the user's own key would be sent
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(door.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(door.answer_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(door: GatewayAccess) -> Start:
    provider = {
        "name": "Turnkeep",
        "base_url": door.openai_url,
        "wire_api": "responses",
        "env_key": "TURNKEEP_GATEWAY_KEY",
    }
    settings: dict[str, Any] = {
        "model_provider": "turnkeep",
        **{f"model_providers.turnkeep.{name}": value for name, value in provider.items()},
        "model": door.model,
        "model_context_window": door.context_tokens,
    }
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Start({"TURNKEEP_GATEWAY_KEY": door.key}, tuple(arguments))


def _opencode(door: GatewayAccess) -> Start:
    limit = {"context": door.context_tokens, "output": door.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Turnkeep",
        "options": {"baseURL": door.openai_url, "apiKey": door.key, "timeout": False},
        "models": {
            door.model: {
                "name": door.model,
                "limit": limit,
                "tool_call": True,
                "attachment": door.sees,
                "modalities": {"input": door.inputs, "output": ["text"]},
            }
        },
    }
    name = f"turnkeep/{door.model}"
    config = {"provider": {"turnkeep": provider}, "model": name, "small_model": name}
    return Start({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _pi(door: GatewayAccess) -> Start:
    model = {
        "id": door.model,
        "name": door.model,
        "reasoning": False,
        "input": door.inputs,
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": door.context_tokens + max(_PI_RESERVE - door.answer_tokens, 0),
        "maxTokens": door.answer_tokens,
    }
    provider = {
        "name": "Turnkeep",
        "baseUrl": door.openai_url,
        "apiKey": door.key,
        "api": "openai-completions",
        "models": [model],
    }
    extension = f'export default (pi) => pi.registerProvider("turnkeep", {json.dumps(provider)});\n'
    arguments = ("--extension", "{folder}/pi.js", "--provider", "turnkeep", "--model", door.model)
    return Start({}, arguments, {"pi.js": extension})


def _continue(door: GatewayAccess) -> Start:
    model = {
        "name": door.model,
        "provider": "openai",
        "model": door.model,
        "apiBase": door.openai_url,
        "apiKey": door.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", *(["image_input"] if door.sees else [])],
        "defaultCompletionOptions": {"contextLength": door.context_tokens, "maxTokens": door.answer_tokens},
    }
    config = {"name": "Turnkeep", "version": "1.0.0", "schema": "v1", "models": [model]}
    # JSON is valid YAML.
    return Start({}, ("--config", "{folder}/continue.yaml"), {"continue.yaml": json.dumps(config)})


def _aider(door: GatewayAccess) -> Start:
    name = f"openai/{door.model}"
    limits = {
        "max_tokens": door.answer_tokens,
        "max_input_tokens": door.context_tokens,
        "max_output_tokens": door.answer_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
        "supports_vision": door.sees,
    }
    return Start(
        {"OPENAI_API_BASE": door.openai_url, "OPENAI_API_KEY": door.key},
        ("--model", name, "--model-metadata-file", "{folder}/aider.json"),
        {"aider.json": json.dumps({name: limits})},
    )


def _other(door: GatewayAccess) -> Start:
    """Start any other program with the variables that OpenAI's and Anthropic's client libraries read."""
    return Start(
        {
            "OPENAI_BASE_URL": door.openai_url,
            "OPENAI_API_BASE": door.openai_url,
            "OPENAI_API_KEY": door.key,
            "OPENAI_MODEL": door.model,
            "ANTHROPIC_BASE_URL": door.url,
            "ANTHROPIC_AUTH_TOKEN": door.key,
            "ANTHROPIC_MODEL": door.model,
        }
    )


#: By the name of the program. Other programs get the variables of OpenAI's and Anthropic's libraries.
AGENTS: Final[Mapping[str, Callable[[GatewayAccess], Start]]] = {
    "aider": _aider,
    "claude": _claude,
    "cn": _continue,
    "codex": _codex,
    "opencode": _opencode,
    "pi": _pi,
}


#: The command that installs each of these agents.
INSTALLS: Final[Mapping[str, str]] = {
    "aider": "pipx install aider-chat",
    "claude": "npm install -g @anthropic-ai/claude-code",
    "cn": "npm install -g @continuedev/cli",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "pi": "npm install -g @mariozechner/pi-coding-agent",
}

#: Tokens of these agents' own system prompts and tools.
_OWN_PROMPTS: Final = {"claude": 20_000, "codex": 10_000}
#: Options that shorten an agent's own prompt, by an unknown number of tokens.
_SHORTENED: Final = {"claude": {"--tools", "--system-prompt", "--system-prompt-file"}}


def own_prompt_tokens(program: str, arguments: Sequence[str]) -> int:
    """Return about how many tokens a program's own system prompt and tools take; 0 if unknown.

    It is unknown if the `arguments` shorten them.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    return 0 if given & _SHORTENED.get(program, set()) else _OWN_PROMPTS.get(program, 0)


def start_of(program: str, door: GatewayAccess) -> Start:
    """Return how to start a program so that it uses the gateway `door`."""
    return AGENTS.get(program, _other)(door)
