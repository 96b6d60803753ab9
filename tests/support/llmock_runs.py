"""Runs of an agent through the real loop against a breaking server, here and now.

A wait of a run is waited for as long as its record says, and ended by recovery, as on a worker.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakeredis

from runner import Agent, background, keys
from runner.agents import Agents
from runner.context import goal_message
from runner.loop import CallTools, Loop, Next, NextStep
from runner.model import OpenAIModel
from runner.models import FinalResult
from runner.settings import Settings
from runner.store import RunStore
from support.llmock_agents import ANSWER, CALLS, LINES
from support.llmock_server import KEY, ChaosServer

RUN = "run-under-test"
LONGEST = 20.0
"""Seconds after which a run that hasn't ended never will."""

GOAL = "Reserve twelve pieces of A001 for account 7, and charge it. " * 8
"""Long enough to cost more tokens than a drained quota has left."""


@dataclass(frozen=True)
class Ending:
    """What became of a run, the waits that it planned, and what the server saw of it."""

    result: FinalResult
    ledger: list[str]
    requests: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    waits: list[float]

    @property
    def has_answer(self) -> bool:
        """Whether it is the right and whole one, with each tool run once."""
        each_once = sorted(self.ledger) == sorted(LINES)
        return self.result.ok and self.result.answer == ANSWER and each_once

    @property
    def is_harmless(self) -> bool:
        """Whether no tool ran twice, or with arguments that nobody meant."""
        return len(set(self.ledger)) == len(self.ledger) and set(self.ledger) <= set(LINES)

    @property
    def faults(self) -> list[str]:
        """The faults that requests met, as llmock names them."""
        return [each["fault"] for each in self.requests if each["fault"]]


def call_turn(*names: str) -> dict[str, Any]:
    """What a model says that wants these tools called, however often it is asked."""
    wanted = [{"name": name, "arguments": arguments} for name, arguments in CALLS if name in names]
    return {"type": "reply", "tool_calls": wanted, "times": None}


def answer_turn() -> dict[str, Any]:
    return {"type": "reply", "text": ANSWER, "times": None}


def run_through(
    server: ChaosServer,
    agent: Agent,
    break_it: Callable[[], None],
    *,
    after_tools: bool,
    ledger: Path,
    model_timeout: float,
) -> Ending:
    """One run: a goal, a step with two tools, an answer; `break_it` arms a fault at one place."""
    settings = Settings(model_timeout=model_timeout)
    store = RunStore(settings, fakeredis.FakeRedis(decode_responses=True))
    model = OpenAIModel(server.url, KEY)
    loop = Loop(store, Agents([agent]), settings=settings, model=model)
    armed = False

    def prepare() -> None:
        """A model goes by its history: it calls what has no result yet, and answers then."""
        nonlocal armed
        done = {line.split()[0] for line in read_lines(ledger)}
        missing = [name for name, _ in CALLS if name not in done]
        server.drop()
        server.queue(call_turn(*missing) if missing else answer_turn())
        if not armed and (not missing or not after_tools):
            armed = True
            break_it()

    ledger.write_text("")
    server.reset()
    store.create_run(
        run_id=RUN, agent=agent.name, messages=[goal_message(GOAL)], limits=agent.limits
    )
    try:
        result = _drive(loop, store, prepare)
        waits = read_waits(store, RUN)
    finally:
        background.submit(model.aclose()).result(5)
        loop.close()
        store.close()
    found = [each for each in server.findings if each["path"].endswith("/chat/completions")]
    seen = [each for each in server.requests if each["path"].endswith("/chat/completions")]
    return Ending(result, read_lines(ledger), seen, found, waits)


def read_lines(ledger: Path) -> list[str]:
    return ledger.read_text().splitlines()


def read_waits(store: RunStore, run_id: str) -> list[float]:
    """The waits before another attempt that the run planned, in seconds."""
    events = store.read_events(run_id, "0")
    return [each.data["delay"] for each in events if each.type == "run.waiting"]  # type: ignore[misc]


def _drive(loop: Loop, store: RunStore, prepare: Callable[[], None]) -> FinalResult:
    pending: deque[Next] = deque([NextStep(RUN, 0)])
    next_step, ends_at = 0, time.monotonic() + LONGEST
    while (result := store.read_result(RUN)) is None:
        assert time.monotonic() < ends_at, "the run doesn't end"
        if not pending:
            pending.append(_wait_until_due(loop, store))
        match pending.popleft():
            case NextStep(_, step):
                if step == next_step:
                    prepare()
                    next_step += 1
                pending.append(loop.advance(RUN, step))
            case CallTools(_, step, indexes):
                pending.extend(loop.call_tool(RUN, step, index) for index in indexes)
            case _:
                pass
    return result


def _wait_until_due(loop: Loop, store: RunStore) -> Next:
    due: Any = store.redis.zscore(keys.DUE, RUN)
    time.sleep(max(0.0, due / 1000 - time.time()) + 0.002)
    return loop.recover(RUN)


def describe(ending: Ending) -> str:
    """What a failed check shows."""
    error = ending.result.error
    told = {
        "stop_reason": ending.result.stop_reason,
        "error": error and [error.type, error.message],
        "answer": ending.result.answer,
        "ledger": ending.ledger,
        "requests": [
            [each["status"], each["fault"], each["completed"], each["chunks_sent"]]
            for each in ending.requests
        ],
        "findings": [[each["severity"], each["code"], each["title"]] for each in ending.findings],
    }
    return json.dumps(told, indent=1, default=str)
