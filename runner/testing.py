"""For users' tests: a scripted model, a run of an agent in the test's own process, and a replay.

Needs `pip install 'celeriac[testing]'`; no server, no worker, no network.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from runner.agents import Agent, Agents
from runner.context import goal_message
from runner.errors import CeleriacError, ScriptError
from runner.loop import (
    CallTools,
    Loop,
    Next,
    NextStep,
    answer_question,
    approve_call,
    deny_call,
)
from runner.models import (
    Approval,
    Final,
    FinalResult,
    ModelReply,
    ModelRequest,
    Principal,
    ProposedCall,
    ToolCalls,
    Usage,
)
from runner.recording import Recording, load_recording
from runner.replay import Replayed
from runner.replay import replay as replay_recording
from runner.settings import Settings
from runner.store import RunStore

try:
    import fakeredis
except ImportError as error:
    raise ImportError("runner.testing needs fakeredis: pip install 'celeriac[testing]'") from error

Reply = str | ToolCalls | Final | Exception | Callable[[ModelRequest], "Reply"]

USAGE = Usage(requests=1, prompt_tokens=10, completion_tokens=5, total_tokens=15)


class ScriptedModel:
    """Answers with the given replies in order, and keeps the requests that it was sent.

    A reply is a text (the final answer), the result of `calls(...)`, an exception to raise, or a
    function of the request that returns one of these.
    """

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = deque(replies)
        self.name: str | None = None
        self.requests: list[ModelRequest] = []

    async def respond(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        if not self._replies:
            raise ScriptError(
                f"the model was asked {len(self.requests)} times; its script is shorter"
            )
        try:
            return _as_reply(self._replies.popleft(), request)
        except AssertionError as error:
            raise ScriptError(str(error)) from error


def calls(*proposed: tuple[str, Mapping[str, Any]], text: str | None = None) -> ToolCalls:
    """A turn that asks for these (tool, arguments), with the provider ids c0, c1, ..."""
    made = tuple(
        ProposedCall(provider_id=f"c{index}", name=name, arguments=json.dumps(dict(arguments)))
        for index, (name, arguments) in enumerate(proposed)
    )
    return ToolCalls(calls=made, text=text, usage=USAGE, raw="")


def run_agent(
    agent: Agent,
    goal: str,
    *,
    model: ScriptedModel | None = None,
    principal: Principal | None = None,
    metadata: Mapping[str, JsonValue] | None = None,
    replies: Sequence[str] = (),
    approve: Callable[[Approval], bool | str] | None = None,
) -> FinalResult:
    """Run an agent to its end, here and now, through the same loop and the same transitions.

    `model` takes the place of the agent's own, under its name. `replies` are what the user answers
    to the model's questions, in order (an agent with `clarify`). `approve` is asked of each call
    that needs an approval, when nothing else moves: True, or False or a reason to deny it. A wait
    (a retry after an error) isn't slept through: it raises, since a test that means to wait wants a
    real worker.
    """
    settings = Settings()
    store = RunStore(settings, fakeredis.FakeRedis(decode_responses=True))
    if model is not None and isinstance(agent.model, str):
        model.name = agent.model
    used = agent if model is None else replace(agent, model=model)
    loop = Loop(store, Agents([used]), settings=settings)
    run_id = "run-under-test"
    store.create_run(
        run_id=run_id,
        agent=used.name,
        messages=[goal_message(goal)],
        limits=used.limits,
        principal=principal,
        metadata=metadata,
    )
    try:
        return _drive(loop, store, run_id, deque(replies), approve)
    finally:
        loop.close()


def replay(recorded: Recording | Path | str, agent: Agent) -> Replayed:
    """Replay a run that `celeriac replay RUN --save FILE` has written, or a `Recording`.

    Nothing is asked and no tool runs. A regression test says `assert replay(path, agent).same`, or
    looks at the `differences`. Raises `InvalidInput` where the file holds no recording.
    """
    if not isinstance(recorded, Recording):
        recorded = load_recording(Path(recorded))
    return replay_recording(recorded, agent)


def _drive(
    loop: Loop,
    store: RunStore,
    run_id: str,
    replies: deque[str],
    approve: Callable[[Approval], bool | str] | None,
) -> FinalResult:
    pending: deque[Next] = deque([NextStep(run_id, 0)])
    while pending:
        match pending.popleft():
            case NextStep(_, step):
                pending.append(loop.advance(run_id, step))
            case CallTools(_, step, indexes):
                pending.extend(loop.call_tool(run_id, step, index) for index in indexes)
            case _:
                pass
        if not pending and replies and (questions := store.read_questions(run_id)):
            pending.append(answer_question(store, run_id, replies.popleft(), next(iter(questions))))
        if not pending and (waiting := store.read_approvals(run_id)):
            pending.append(_decide(store, run_id, waiting[0], approve))
    result = store.read_result(run_id)
    if result is None:
        raise CeleriacError(_why_waiting(store, run_id))
    return result


def _decide(
    store: RunStore,
    run_id: str,
    waiting: Approval,
    approve: Callable[[Approval], bool | str] | None,
) -> Next:
    if approve is None:
        raise CeleriacError(
            f"the run waits for an approval of call {waiting.call_id} ({waiting.tool}); decide on "
            "it with run_agent(..., approve=lambda call: True), or return a reason to deny it"
        )
    decision = approve(waiting)
    if decision is True:
        return approve_call(store, run_id, waiting.call_id, digest=waiting.digest)
    reason = decision if isinstance(decision, str) else "denied by the test"
    return deny_call(store, run_id, waiting.call_id, reason, digest=waiting.digest)


def _why_waiting(store: RunStore, run_id: str) -> str:
    if store.read_questions(run_id):
        return "the model asks the user: give run_agent what is replied, as replies=[...]"
    return "the run is waiting (a retry after an error), which run_agent doesn't"


def _as_reply(reply: Reply, request: ModelRequest) -> ModelReply:
    match reply:
        case str():
            return Final(text=reply, usage=USAGE, raw="")
        case Exception():
            raise reply
        case Final() | ToolCalls():
            return reply
        case _:
            return _as_reply(reply(request), request)
