"""What a user configures: an agent, and the set of agents that a process knows."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from runner.errors import AgentError, UnknownAgent
from runner.models import Limits, Model, Retry
from runner.tools import Tool, Toolbox

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A model, its instructions and its tools, with the limits that the runtime enforces.

    `model` is a name for the OpenAI-compatible endpoint of the environment (None: the setting
    `CELERIAC_MODEL`), or any object with `async respond(request)`. `output_type` is a type that the
    final answer is validated against; an answer that fails goes back to the model up to
    `response_retries` times, as does a response that can't be used.
    """

    name: str
    instructions: str = ""
    tools: Sequence[Tool] = ()
    model: str | Model | None = None
    limits: Limits = field(default_factory=Limits)
    model_retry: Retry = field(default_factory=Retry)
    response_retries: int = 2
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    output_type: type | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise AgentError(
                f"agent name {self.name!r} can't be used: letters, digits, _ and -, at most 64"
            )
        if self.response_retries < 0:
            raise AgentError(f"agent {self.name}: response_retries must be 0 or more")
        object.__setattr__(self, "toolbox", Toolbox(self.tools))
        object.__setattr__(
            self, "output", None if self.output_type is None else TypeAdapter(self.output_type)
        )

    toolbox: Toolbox = field(init=False, repr=False, compare=False)
    output: TypeAdapter[Any] | None = field(init=False, repr=False, compare=False)

    @property
    def fingerprint(self) -> str:
        """Changes when what the model is told changes: instructions, tools or output type."""
        told = [self.instructions, self.toolbox.definitions(), self.output_schema]
        text = json.dumps(told, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def output_schema(self) -> dict[str, Any] | None:
        return None if self.output is None else self.output.json_schema()


class Agents(Mapping[str, Agent]):
    """The agents that a process knows, by name."""

    def __init__(self, agents: Iterable[Agent] = ()) -> None:
        self._agents: dict[str, Agent] = {}
        for agent in agents:
            known = self._agents.setdefault(agent.name, agent)
            if known is not agent:
                raise AgentError(f"two agents are called {agent.name!r}; give one another name")

    def __getitem__(self, name: str) -> Agent:
        try:
            return self._agents[name]
        except KeyError:
            known = ", ".join(sorted(self._agents)) or "none"
            raise UnknownAgent(f"no agent named {name!r}; known agents: {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._agents

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)


def load_agents(modules: Sequence[str]) -> Agents:
    """Import `modules` and collect every `Agent` that stands at their top level.

    Raises `AgentError` where there is no module, one can't be imported, or none holds an agent.
    """
    if not modules:
        raise AgentError(
            "no agents: set CELERIAC_AGENTS to the modules that define them, e.g. shop.agents"
        )
    found: list[Agent] = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            # Whatever a user's module raises at import is theirs to read, in one line.
            raise AgentError(
                f"CELERIAC_AGENTS: can't import {name!r}: {type(error).__name__}: {error}"
            ) from error
        found += [value for value in vars(module).values() if isinstance(value, Agent)]
    if not found:
        raise AgentError(f"CELERIAC_AGENTS: no Agent at the top level of {', '.join(modules)}")
    return Agents(found)
