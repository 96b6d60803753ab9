"""A loop on a store with a run of one agent, driven by hand in the test's own thread."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner import Agent, Event, FinalResult, ModelRequest
from runner import keys as redis_keys
from runner.agents import Agents
from runner.context import goal_message, rebuild_request
from runner.loop import CallTools, Loop, Next, NextStep, answer_question
from runner.model import write_request
from runner.models import Limits, Model
from runner.record import RunRecord
from runner.store import RunStore
from support.replays import check_replay

RUN = "run-under-test"


@dataclass
class Loops:
    """Starts runs on one store, and tells what has become of them."""

    store: RunStore
    loops: list[Loop] = field(default_factory=list)
    agents: dict[str, Agent] = field(default_factory=dict)

    def start(self, agent: Agent, *, limits: Limits | None = None) -> Loop:
        """A loop, and the run `RUN` of this agent."""
        self.store.create_run(
            run_id=RUN,
            agent=agent.name,
            messages=[goal_message("go")],
            limits=limits or agent.limits,
        )
        self.store.granted.clear()  # a test takes the first step by itself
        return self.open(agent)

    def moved_by_hand(self) -> None:
        """What a test does without the loop is in no trace: its runs can't be replayed."""
        self.agents.clear()

    def open(self, agent: Agent) -> Loop:
        """A loop for a run that there is already, as another worker has one."""
        self.agents[RUN] = agent
        self.loops.append(Loop(self.store, Agents([agent]), settings=self.store.settings))
        return self.loops[-1]

    def close(self) -> None:
        close_loops(self.store, self.loops)

    def reply(self, text: str, call_id: str | None = None) -> Next:
        return answer_question(self.store, RUN, text, call_id)

    @property
    def record(self) -> RunRecord:
        return self.store.read_run(RUN)

    @property
    def result(self) -> FinalResult:
        found = self.store.read_result(RUN)
        assert found is not None, "the run hasn't ended"
        return found

    @property
    def error_type(self) -> str | None:
        return self.result.error.type if self.result.error else None

    def contents(self) -> list[str]:
        """What the tool messages of the history say."""
        messages = self.store.read_messages(RUN)
        return [str(each["content"]) for each in messages if each["role"] == "tool"]

    def events(self, type: str) -> list[Event]:
        return [each for each in self.store.read_events(RUN, "0") if each.type == type]

    def exchanges(self) -> list[dict[str, Any]]:
        trace = self.store.read_trace(RUN)
        return [made for each in trace if each["kind"] == "model" for made in each["exchanges"]]


def open_loops(store: RunStore) -> Iterator[Loops]:
    """The body of a fixture: after the test all runs of its agent give the same in a replay."""
    opened = Loops(store)
    yield opened
    opened.close()
    for agent in opened.agents.values():
        for record in store.list_runs(1000):
            if record.agent == agent.name:
                check_replay(store, record.run_id, agent)


def close_loops(store: RunStore, loops: Sequence[Loop]) -> None:
    """Close these, and wait for the threads that listen on this store."""
    for loop in loops:
        loop.close()
    store.redis.publish(redis_keys.NUDGE, "nobody")  # ends the listeners' wait for a message
    for thread in threading.enumerate():
        if thread.name == "celeriac-nudges":
            thread.join(5)


@contextlib.contextmanager
def loop_of_worker(store: RunStore, *agents: Agent, model: Model | None = None) -> Iterator[Loop]:
    """A loop whose store leaves the hints to whoever drives it, unlike that of a client."""
    own = RunStore(store.settings)
    loop = Loop(own, Agents(agents), settings=own.settings, model=model)
    try:
        yield loop
    finally:
        close_loops(own, [loop])
        own.close()


def drive(loop: Loop, first: Next | None = None) -> Next:
    """Do what comes next until nothing does; hints are followed in order."""
    pending: deque[Next] = deque([first or NextStep(RUN, 0)])
    last: Next = pending[0]
    while pending:
        last = pending.popleft()
        match last:
            case NextStep(run_id, step):
                pending.append(loop.advance(run_id, step))
            case CallTools(run_id, step, indexes):
                pending.extend(loop.call_tool(run_id, step, index) for index in indexes)
            case _:
                pass
    return last


def check_requests(store: RunStore, requests: Sequence[ModelRequest]) -> None:
    """Every request passes the writer, and the trace rebuilds it exactly as it was sent."""
    history = store.read_messages(RUN)
    agent: dict[str, Any] = {}
    rebuilt: list[dict[str, Any]] = []
    for entry in store.read_trace(RUN):
        if entry["kind"] == "model":
            agent = entry.get("agent", agent)
            rebuilt += [
                rebuild_request(exchange["request"], agent, history)
                for exchange in entry["exchanges"]
            ]
    for request in requests:
        write_request(request)
    assert rebuilt == [
        {
            "model": request.model,
            "messages": list(request.messages),
            "tools": list(request.tools),
            "tool_choice": request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls,
        }
        for request in requests
    ]
