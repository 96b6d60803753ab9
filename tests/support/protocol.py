"""Reads the lines of `tests/protocol/cases.jsonl`, runs them, and checks what they expect.

The rule: whatever a line says is checked or the test fails. A key that has no check here, and a
sentence that no predicate was written for, are failures and never passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from runner import Agent, Event, FinalResult, StopReason
from support.model_server import ModelCall, ModelServer, Reply, check_request
from support.protocol_agents import BY_CONFIG
from support.stage import Stage
from tasks import Run

LINE_KEYS = {
    "id",
    "category",
    "case",
    "input",
    "config",
    "model_response",
    "stream",
    "tool_definition",
    "situation",
    "expected",
}
ALLOWED = {"deepseek": {"reasoning_content"}}
"""What an agent's server takes beyond the keys of the strictest one."""

REPLY_KEYS = {"status", "headers", "json", "text"}


@dataclass(frozen=True, slots=True)
class Case:
    """One line: what a server sends, a tool returns or happens, and what must then be true."""

    id: str
    expected: dict[str, Any]
    replies: tuple[Reply, ...] | None = None
    stream: tuple[dict[str, Any], ...] | None = None
    tool_definition: str | None = None
    situation: str | None = None
    config: str = "{}"

    @property
    def agent(self) -> Agent:
        """The agent of this configuration; a KeyError where none was written."""
        return BY_CONFIG[self.config]


def load_cases(path: Path) -> dict[str, Case]:
    """Every line by its id. Raises ValueError for a line with a key that nothing would read."""
    cases: dict[str, Case] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        if unknown := sorted(given.keys() - LINE_KEYS):
            raise ValueError(f"{given['id']}: nothing reads {', '.join(unknown)}")
        replies = given.get("model_response")
        if any(reply.keys() - REPLY_KEYS for reply in replies or ()):
            raise ValueError(f"{given['id']}: a reply has an unknown key")
        if given["id"] in cases:
            raise ValueError(f"{given['id']} stands there twice")
        cases[given["id"]] = Case(
            id=given["id"],
            expected=given["expected"],
            replies=None if replies is None else tuple(replies),
            stream=given.get("stream"),
            tool_definition=given.get("tool_definition"),
            situation=given.get("situation"),
            config=json.dumps(given.get("config", {})),
        )
    return cases


@dataclass(frozen=True, slots=True)
class Entry:
    """A tool body that was entered: `index` is that of the call in its step."""

    step: int
    index: int
    tool: str
    arguments: dict[str, Any]


class Seen:
    """One run of a case: what its server, its ledger and its record saw of it."""

    def __init__(
        self, stage: Stage, case: Case, agent: Agent, goal: str, run: Run, server: ModelServer
    ) -> None:
        self.stage = stage
        self.server = server
        self.case = case
        self.agent = agent
        self.goal = goal
        self.run = run

    @cached_property
    def result(self) -> FinalResult:
        return self.run.result(timeout=60)

    @property
    def calls(self) -> list[ModelCall]:
        """The requests that the model server was sent for this run, in order."""
        return [call for call in self.server.requests if goal_of(call.body) == self.goal]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [call.body for call in self.calls]

    @property
    def ledger(self) -> list[str]:
        """The run's lines, each without the run's id: `<step>.<index> <what> ...`."""
        start = f"{self.run.id}."
        lines = self.stage.fleet.ledger
        return [line.removeprefix(start) for line in lines if line.startswith(start)]

    @property
    def entries(self) -> list[Entry]:
        found = []
        for line in self.ledger:
            call_id, what, *rest = line.split(" ", 3)
            if what == "enter":
                step, index = call_id.split(".")
                found.append(Entry(int(step), int(index), rest[0], json.loads(rest[1])))
        return found

    @property
    def events(self) -> list[Event]:
        return list(self.run.events())

    @property
    def view(self) -> list[dict[str, Any]]:
        """The messages of the last request; of a run that was cancelled, those that are stored."""
        if self.result.stop_reason is StopReason.CANCELLED:
            return self.run.messages()
        return list(self.bodies[-1]["messages"])

    @property
    def turns(self) -> list[dict[str, Any]]:
        return [each for each in self.view if each["role"] == "assistant"]

    @property
    def called(self) -> list[dict[str, Any]]:
        """The calls of all turns as they are sent back: `id`, `type`, `function`."""
        return [call for turn in self.turns for call in turn.get("tool_calls", ())]

    @property
    def tool_messages(self) -> list[dict[str, Any]]:
        return [each for each in self.view if each["role"] == "tool"]

    @property
    def contents(self) -> list[str]:
        return [each["content"] for each in self.tool_messages]


def goal_of(body: dict[str, Any]) -> str:
    """The first thing that the user said: what tells the runs apart."""
    return next(str(each["content"]) for each in body["messages"] if each["role"] == "user")


def submit(
    stage: Stage,
    case: Case,
    replies: tuple[Reply, ...],
    *,
    agent: Agent | None = None,
    n: int = 0,
    server: ModelServer | None = None,
) -> Seen:
    """Start a run of this case; `n` tells several runs of one case apart.

    `server` is where the agent's model is, if not at the stage's own.
    """
    agent = agent or case.agent
    goal = f"case {case.id}, agent {agent.name}, run {n}"
    stage.script(goal, replies)
    run = stage.client.submit(goal, agent=agent.name)
    return Seen(stage, case, agent, goal, run, server or stage.model)


# --- checks ---------------------------------------------------------------------------------------

Predicate = Callable[[Any], None]

SENTENCES: dict[tuple[str, str, str], Predicate] = {}
"""What a sentence of a case means: by the case's id, the key, and the sentence itself."""


def means(case_id: str, key: str, sentence: str) -> Callable[[Predicate], Predicate]:
    """Register the predicate for a sentence; it is handed what the case's test has seen."""

    def remember(predicate: Predicate) -> Predicate:
        assert (case_id, key, sentence) not in SENTENCES, "two predicates for one sentence"
        SENTENCES[case_id, key, sentence] = predicate
        return predicate

    return remember


def check_sentence(case: Case, key: str, sentence: str, subject: Any) -> None:
    predicate = SENTENCES.get((case.id, key, sentence))
    assert predicate is not None, f"{case.id}: no predicate for {key} {sentence!r}"
    predicate(subject)


def check_run(seen: Seen) -> None:
    """Check every key that the case expects of its run, and what holds for each run anyway."""
    result = seen.result
    for body in seen.bodies:
        assert check_request(body, allow=ALLOWED.get(seen.agent.name, ())) == []
    assert result.usage.requests == len(seen.bodies)
    if result.stop_reason is StopReason.COMPLETED:
        assert (result.ok, result.error) == (True, None)
        assert isinstance(result.answer, str)
        assert result.answer.strip()
    else:
        assert (result.ok, result.answer) == (False, None)
        assert result.error is not None
    for key, value in seen.case.expected.items():
        check = CHECKS.get(key)
        assert check is not None, f"{seen.case.id}: no check for {key!r}"
        check(seen, key, value)


def _check_stop_reason(seen: Seen, key: str, value: Any) -> None:
    assert seen.result.stop_reason == value, seen.result.error


def _check_run_error(seen: Seen, key: str, value: Any) -> None:
    assert seen.result.error is not None
    assert seen.result.error.type == value


def _check_answer(seen: Seen, key: str, value: Any) -> None:
    assert seen.result.answer == value


def _check_model_calls(seen: Seen, key: str, value: Any) -> None:
    if value == "1 + response_retries":
        value = 1 + seen.agent.response_retries
    assert len(seen.calls) == value


def _check_tool_executions(seen: Seen, key: str, value: Any) -> None:
    if value == "charge once":
        assert [each.tool for each in seen.entries].count("charge") == 1
        return
    assert isinstance(value, int), f"{seen.case.id}: no check for {key} {value!r}"
    assert len(seen.entries) == value


def _check_tool_messages(seen: Seen, key: str, value: Any) -> None:
    shown = seen.tool_messages
    assert len(shown) == len(value)
    for index, (message, wanted) in enumerate(zip(shown, value, strict=True)):
        _check_tool_message(message, wanted, index)


def _check_tool_message(message: dict[str, Any], wanted: dict[str, Any], index: int) -> None:
    error = error_in(message["content"])
    for key, value in wanted.items():
        match key:
            case "id":
                assert message["tool_call_id"] == value
            case "index":
                assert index == value
            case "ok":
                assert (error is None) is value
            case "error_type":
                assert error is not None
                assert error["type"] == value
            case "mentions":
                assert error is not None
                assert value in [*error["fields"], *error["message"].split()]
            case _:
                raise AssertionError(f"no check for {key!r} of a tool message")


def error_in(content: str) -> dict[str, Any] | None:
    """The error that a tool message tells the model of; None where it holds a result."""
    try:
        told = json.loads(content)
    except ValueError:
        return None
    if not isinstance(told, dict) or told.get("ok") is not False:
        return None
    error = told["error"]
    assert isinstance(error, dict)
    return error


def _check_steps_used(seen: Seen, key: str, value: Any) -> None:
    assert seen.result.steps == value


def _check_usage(seen: Seen, key: str, value: Any) -> None:
    found = seen.result.usage.model_dump()
    assert {each: found[each] for each in value} == value


def _check_next(seen: Seen, key: str, value: Any) -> None:
    assert value == "one bounded retry", f"no check for {key} {value!r}"
    assert len(seen.calls) == 2
    assert [each.type for each in seen.events].count("run.waiting") == 1


def _check_tool_result(seen: Seen, key: str, value: Any) -> None:
    """Of a case with one call: it ran once, unless it may be repeated, and the run goes on."""
    assert value in ("ok", "error"), f"no check for {key} {value!r}"
    assert seen.result.stop_reason is StopReason.COMPLETED
    assert len(seen.entries) == 1
    (message,) = seen.tool_messages
    assert (error_in(message["content"]) is None) is (value == "ok")


def _check_tool_error(seen: Seen, key: str, value: Any) -> None:
    (message,) = seen.tool_messages
    error = error_in(message["content"])
    assert error is not None
    assert error["type"] == value


def _check_sentence(seen: Seen, key: str, value: Any) -> None:
    check_sentence(seen.case, key, value, seen)


CHECKS: dict[str, Callable[[Seen, str, Any], None]] = {
    "stop_reason": _check_stop_reason,
    "run_error": _check_run_error,
    "answer": _check_answer,
    "model_calls": _check_model_calls,
    "tool_executions": _check_tool_executions,
    "tool_messages": _check_tool_messages,
    "steps_used": _check_steps_used,
    "usage": _check_usage,
    "next": _check_next,
    "tool_result": _check_tool_result,
    "tool_error": _check_tool_error,
    "tool_message": _check_sentence,
    "history": _check_sentence,
    "note": _check_sentence,
    "outcome": _check_sentence,
}
