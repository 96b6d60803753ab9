"""What a user configures: an agent, and the set of agents that a process knows."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from runner.clarify import ask_user
from runner.errors import AgentError, CeleriacError, UnknownAgent
from runner.limits import find_quarrel
from runner.models import (
    Evidence,
    Limits,
    Model,
    Price,
    Principal,
    Retry,
    ToolResult,
)
from runner.tools import Tool, Toolbox

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

MIN_CONTEXT_TOKENS = 1_000
"""In less there is no room for a note beside a turn: it is a slip, or a number of thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An answer before it is final, with what it can be held against.

    `answer` is the text, or the object where the agent has an `output_type`; `results` are those of
    all calls of the run, as its trace keeps them, and `evidence` what they found, in call order.
    """

    goal: str
    text: str
    answer: JsonValue
    results: Sequence[ToolResult] = ()
    evidence: Sequence[Evidence] = ()
    principal: Principal | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


Validator = Callable[[Draft], str | None]


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A model, its instructions and its tools, with the limits that the runtime enforces.

    `model` is a name for the OpenAI-compatible endpoint of the environment (None: the setting
    `CELERIAC_MODEL`), or any object with `async respond(request)`. `output_type` is a type that the
    final answer is validated against; an answer that fails goes back to the model up to
    `response_retries` times, as does a response that can't be used, or an answer in which one of
    the `validators` finds fault. A validator is handed a `Draft` and returns what is wrong with it,
    for the model to read, or None. `evidence_required`: an answer without evidence is none.

    `fallback_models` are asked, in order, when the one before is out. `prices` say what a model's
    tokens cost, by its name; `Limits(max_cost=)` needs them. `clarify` lets the model ask the user.
    `stream` tells followers an answer as it comes (`model.delta` events). `requires` are the scopes
    that a principal needs to use the agent at all. `model_concurrency` is how many steps ask the
    same model at once in the whole fleet.

    With `compaction`, a conversation that doesn't fit the model's context is shown to it in part:
    by the server's word that it is too long or, with `context_tokens` (the model's context, which
    implies it), before it comes to that. `summarize` has the model sum up what is left out.
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
    fallback_models: Sequence[str | Model] = ()
    prices: Mapping[str, Price] = field(default_factory=dict)
    validators: Sequence[Validator] = ()
    evidence_required: bool = False
    clarify: bool = False
    stream: bool = False
    requires: Iterable[str] = frozenset()
    compaction: bool = False
    context_tokens: int | None = None
    summarize: bool = False
    model_concurrency: int | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise AgentError(
                f"agent name {self.name!r} can't be used: letters, digits, _ and -, at most 64"
            )
        for name in ("tools", "fallback_models", "validators"):
            if isinstance(given := getattr(self, name), str) or not isinstance(given, Iterable):
                raise AgentError(f"agent {self.name}: {name} is a list, such as {name}=[...]")
        if isinstance(self.requires, str):
            raise AgentError(f"agent {self.name}: requires is a set of scopes, such as {{'admin'}}")
        object.__setattr__(self, "requires", frozenset(self.requires))
        self._check_numbers()
        tools = (*self.tools, ask_user) if self.clarify else self.tools
        object.__setattr__(self, "toolbox", Toolbox(tools))
        object.__setattr__(
            self, "output", None if self.output_type is None else TypeAdapter(self.output_type)
        )

        finals = [each.name for each in self.toolbox if each.final]
        if finals and (self.validators or self.evidence_required or self.output_type):
            raise AgentError(
                f"agent {self.name}: the answer of {finals[0]} is checked by the tool itself"
                " (raise a ToolError, annotate what it returns); leave out validators, "
                "evidence_required and output_type"
            )
        if self.limits.max_cost is not None:
            named = [each for each in self.models if isinstance(each, str)]
            missing = sorted(set(named) - set(self.prices))
            if missing or not self.prices:
                which = ", ".join(missing) or "its model"
                raise AgentError(
                    f"agent {self.name}: max_cost needs prices for {which}: "
                    "prices={'model': Price(prompt=..., completion=...)}"
                )

    def _check_numbers(self) -> None:
        if self.response_retries < 0:
            raise AgentError(f"agent {self.name}: response_retries must be 0 or more")
        if self.context_tokens is not None and self.context_tokens < MIN_CONTEXT_TOKENS:
            raise AgentError(
                f"agent {self.name}: context_tokens is the model's context, "
                f"{MIN_CONTEXT_TOKENS} tokens or more"
            )
        if self.model_concurrency is not None and self.model_concurrency < 1:
            raise AgentError(f"agent {self.name}: model_concurrency must be 1 or more")

    toolbox: Toolbox = field(init=False, repr=False, compare=False)
    output: TypeAdapter[Any] | None = field(init=False, repr=False, compare=False)

    @property
    def models(self) -> tuple[str | Model | None, ...]:
        """The model, and those that stand in for it, in order."""
        return (self.model, *self.fallback_models)

    @property
    def compacts(self) -> bool:
        """Whether a history that is too long is shown in part."""
        return self.compaction or self.summarize or self.context_tokens is not None

    @property
    def redacted(self) -> frozenset[str]:
        """The names of fields that any of its tools wants hidden."""
        return frozenset(name for each in self.toolbox for name in each.redact)

    @cached_property
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
        _check_limits(self._agents.values())

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


def _check_limits(agents: Iterable[Agent]) -> None:
    """Who shares a limit must agree on it: raises `AgentError` otherwise."""
    known = list(agents)
    shared = find_quarrel(each.limits for agent in known for each in agent.toolbox)
    if shared is not None:
        raise AgentError(
            f"two tools give the limit {shared.removeprefix('rate.')!r} different sizes; give all "
            "that share it the same max_concurrency and rate"
        )
    asked = find_quarrel(
        {str(model): str(agent.model_concurrency)}
        for agent in known
        if agent.model_concurrency
        for model in agent.models
    )
    if asked is not None:
        raise AgentError(
            f"two agents give model {asked!r} different limits; give them the same "
            "model_concurrency"
        )


def load_agents(modules: Sequence[str]) -> Agents:
    """Import `modules` and collect every `Agent` that stands at their top level.

    Raises `AgentError` where there is no module, one can't be imported, or none holds an agent.
    """
    if not modules:
        raise AgentError(
            "no agents: set CELERIAC_AGENTS to the modules that define them, e.g. shop.agents"
        )
    found: list[Agent] = []
    files: list[str] = []
    for name in modules:
        module = _import_module(name)
        found += [value for value in vars(module).values() if isinstance(value, Agent)]
        # Which file it is tells a user whose module of that name was found.
        files.append(f"{name} ({getattr(module, '__file__', None) or 'a folder'})")
    if not found:
        raise AgentError(f"CELERIAC_AGENTS: no Agent at the top level of {', '.join(files)}")
    return Agents(found)


def _import_module(name: str) -> ModuleType:
    if name.endswith(".py") or name.startswith(".") or "/" in name or "\\" in name:
        dotted = re.sub(r"[/\\]+", ".", name.removesuffix(".py")).strip(".")
        raise AgentError(
            f"CELERIAC_AGENTS takes a module's dotted name, not a path: {dotted}, not {name}"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        # Whatever a user's module raises at import is theirs to read, in one line.
        raise AgentError(
            f"CELERIAC_AGENTS: can't import {name!r}: {_describe(error)}{_cure(error, name)}"
        ) from error


def _describe(error: Exception) -> str:
    match error:
        case CeleriacError():
            return str(error)
        case ValidationError():
            # Its own text has a line for each part, and the link to a page that helps nobody here.
            wrong = (
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
                for each in error.errors(include_url=False, include_input=False)
            )
            return f"{error.title}: {'; '.join(wrong)}"
    return f"{type(error).__name__}: {error}"


def _cure(error: Exception, name: str) -> str:
    """What helps where the module itself wasn't found; nothing where it failed on its own."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or not f"{name}.".startswith(f"{missing}."):
        return ""
    parent = sys.modules.get(missing.rpartition(".")[0])
    place = next(iter(getattr(parent, "__path__", ())), getattr(parent, "__file__", None))
    found = f" ({parent.__name__} is {place})" if parent is not None else ""
    top = name.partition(".")[0]
    return f"{found}; start from the folder that holds {top}, or name that folder in PYTHONPATH"
