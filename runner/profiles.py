"""What differs between servers that all say they speak chat completions, as data.

The writer asks a profile and never a server's name. Each difference below was seen in that server's
documentation or in a bug report about it; the comment beside it names where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from runner.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How one kind of server wants its requests. The defaults are OpenAI's.

    `empty_content` is the content of an assistant turn that holds nothing but calls.
    `sends_reasoning`: such a turn carries the `reasoning_content` that it came with, or "".
    `id_length`: ids of calls are exactly that many letters and digits; others are replaced, in the
    call and in its result alike. `call_extra` (None: the server takes no `extra_content`) goes with
    each call that came without `extra_content`; a call's own is sent back as it came.
    `output_limit` is the parameter that limits the length of an answer.
    `parallel_tool_calls`, `strict_tools`, `stream_usage`: whether the server takes
    `parallel_tool_calls`, a tool's `strict` and `stream_options`; left out where it doesn't.
    `forces_tools`: whether a tool may be demanded; where not, the choice is left to the model.
    `developer_role`: whether there is one; it is written as `system` where not.
    `bridge` is the text of an assistant turn put between a tool's result and what isn't a turn of
    the assistant, for servers that accept nothing else there.
    `base_path` is what the path of the base URL must end in.
    """

    name: str = "custom"
    empty_content: str | None = None
    sends_reasoning: bool = False
    id_length: int | None = None
    call_extra: Mapping[str, Any] | None = None
    output_limit: str = "max_completion_tokens"
    parallel_tool_calls: bool = True
    strict_tools: bool = True
    stream_usage: bool = True
    forces_tools: bool = True
    developer_role: bool = True
    bridge: str = ""
    base_path: str = ""


OPENAI = Profile(name="openai")

DEEPSEEK = Profile(
    name="deepseek",
    # A turn with calls must bring its reasoning back, an empty one included, or the answer is 400
    # (DeepSeek's guide to thinking mode; deepseek-harness).
    sends_reasoning=True,
    output_limit="max_tokens",  # DeepSeek's reference
    # Thinking, the default of V4, refuses `required` and a named tool (DeepSeek-V3, litellm).
    forces_tools=False,
    developer_role=False,  # "unknown variant `developer`" (pi, theia)
)

MISTRAL = Profile(
    name="mistral",
    id_length=9,  # "must be a-z, A-Z, 0-9, with a length of 9" (opencode, mistral-vibe)
    # null is refused by mistral-common's server; its API takes both.
    empty_content="",
    output_limit="max_tokens",  # 422 on max_completion_tokens (eca, openclaude)
    stream_usage=False,  # 422 on stream_options; usage comes unasked (anon-kode, avante.nvim)
    developer_role=False,
    bridge="OK.",  # "Unexpected role 'user' after role 'tool'" (zed, avante.nvim, hermes-agent)
)

GEMINI = Profile(
    name="gemini",
    # Gemini 3 refuses a call without its signature; this word, from Gemini's guide to thought
    # signatures, stands for one that is not at hand (vercel/ai, pi, strands).
    call_extra={"google": {"thought_signature": "skip_thought_signature_validator"}},
    parallel_tool_calls=False,  # "Unknown name", later "not supported" (magentic)
    strict_tools=False,  # function declarations have no such field (CLIProxyAPI)
    developer_role=False,
)

AZURE = Profile(
    name="azure",
    # With this path a plain client and a key are enough: no api-version, no deployment in the URL
    # (Azure's page on the life cycle of its API).
    base_path="/openai/v1",
)

# What a role means is up to each model's chat template, and few of them know `developer`.
VLLM = Profile(name="vllm", developer_role=False)

OLLAMA = Profile(
    name="ollama",
    empty_content="",  # "invalid message content type: <nil>" (pydantic-ai, cheetahclaws)
    output_limit="max_tokens",  # Ollama's list of supported fields
    parallel_tool_calls=False,  # not on that list
    developer_role=False,
)

LLAMACPP = Profile(
    name="llamacpp",
    empty_content="",  # "Expected 'content' to be a string or an array" (llama.cpp)
    output_limit="max_tokens",
    developer_role=False,
)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (OPENAI, DEEPSEEK, MISTRAL, GEMINI, AZURE, VLLM, OLLAMA, LLAMACPP)
}

_HOSTS: tuple[tuple[str, Profile], ...] = (
    ("deepseek.com", DEEPSEEK),
    ("mistral.ai", MISTRAL),
    ("generativelanguage.googleapis.com", GEMINI),
    ("openai.azure.com", AZURE),
    ("services.ai.azure.com", AZURE),
    ("cognitiveservices.azure.com", AZURE),
    ("ollama.com", OLLAMA),
)
_OLLAMA_PORT = 11434  # its own; the default ports of vLLM and llama.cpp are everybody's


def profile_named(name: str) -> Profile:
    """A profile by its name; raises `SettingsError` that lists the names there are."""
    try:
        return PROFILES[name.strip().lower()]
    except KeyError:
        raise SettingsError(
            f"no profile named {name!r}: use one of {', '.join(PROFILES)}, or a Profile of your own"
        ) from None


def profile_for(base_url: str) -> Profile:
    """The profile of the server at this address, as far as the address tells; else OpenAI's."""
    try:
        parts = urlsplit(base_url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:  # whoever makes the client says what is wrong with it
        return OPENAI
    for known, profile in _HOSTS:
        if host == known or host.endswith("." + known):
            return profile
    return OLLAMA if port == _OLLAMA_PORT else OPENAI
