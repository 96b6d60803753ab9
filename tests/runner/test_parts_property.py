"""Whatever a user, a person who approves, limits and an end do, and in whatever order: every rule
holds after each act, no place stays taken, a replay gives the same, and a deletion leaves nothing.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import fakeredis
import pytest

from runner import Agent, CeleriacError, Limits, keys, tool
from runner.agents import Agents
from runner.context import goal_message
from runner.invariants import check_run
from runner.loop import (
    CallTools,
    Loop,
    Next,
    NextStep,
    answer_question,
    approve_call,
    cancel_run,
    deny_call,
)
from runner.recording import read_recording
from runner.replay import replay
from runner.settings import Settings
from runner.store import Outcome, RunStore
from runner.testing import ScriptedModel, calls

RUNS = ("run-number-one", "run-number-two")
MOST_ACTS = 400
ACTS = ("hint", "hint", "hint", "hint", "approve", "deny", "reply", "send", "recover", "grant")


@tool(approval=True, idempotent=True, max_concurrency=1, limit="crm")
def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@tool(idempotent=True, max_concurrency=1, limit="crm")
def look(chars: int) -> str:
    """Look."""
    return "x" * chars


@tool(idempotent=True, final=True)
def submit(text: str) -> str:
    """Give the answer."""
    return text


class World:
    """Two runs of one agent that share a limit, and everybody who acts on them."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        settings = Settings(hint_grace=0.001)
        self.store = RunStore(settings, fakeredis.FakeRedis(decode_responses=True))
        self.agent = Agent(
            name="a",
            model=ScriptedModel([self.reply] * 1000),
            tools=[pay, look, submit],
            clarify=True,
            context_tokens=1000,
        )
        self.loop = Loop(self.store, Agents([self.agent]), settings=settings)
        self.hints: list[tuple[str, int, int | None]] = []
        limits = Limits(max_steps=self.choose.randint(2, 8), max_parallel_calls=2, max_repeats=50)
        for run_id in RUNS:
            self.store.create_run(
                run_id=run_id, agent="a", messages=[goal_message("go")], limits=limits
            )
            self.hints.append((run_id, 0, None))

    def reply(self, _: object) -> Any:
        known: list[tuple[str, dict[str, Any]]] = [
            ("pay", {"cents": self.choose.randint(1, 9)}),
            ("look", {"chars": self.choose.choice([3, 900])}),
            ("ask_user", {"question": "which?"}),
            ("submit", {"text": "by tool"}),
            ("nope", {}),
        ]
        proposed = self.choose.choices(known, k=self.choose.randint(0, 4))
        return calls(*proposed) if proposed else "done"

    def follow(self, coming: Next) -> None:
        match coming:
            case NextStep(run_id, step):
                self.hints.append((run_id, step, None))
            case CallTools(run_id, step, indexes):
                self.hints += [(run_id, step, index) for index in indexes]
            case _:
                pass
        while self.store.granted:
            to, at, *nth = self.store.granted.popleft().split(".")
            self.hints.append((to, int(at), int(nth[0]) if nth else None))

    def act(self, what: str) -> None:
        run_id = self.choose.choice(RUNS)
        match what:
            case "hint" if self.hints:
                # Any of them, and sometimes it comes again.
                again = self.choose.random() < 0.2
                at = self.choose.randrange(len(self.hints))
                to, step, index = self.hints[at] if again else self.hints.pop(at)
                self.follow(
                    self.loop.advance(to, step)
                    if index is None
                    else self.loop.call_tool(to, step, index)
                )
            case "approve" | "deny":
                for each in self.store.read_approvals(run_id)[:1]:
                    self.follow(
                        approve_call(self.store, run_id, each.call_id)
                        if what == "approve"
                        else deny_call(self.store, run_id, each.call_id, "no")
                    )
            case "reply":
                for call_id in [*self.store.read_questions(run_id)][:1]:
                    self.follow(answer_question(self.store, run_id, "that", call_id))
            case "send":
                said = str(self.choose.random())
                self.store.send_message(run_id, said, said)
            case "recover":
                self.follow(self.loop.recover(run_id))
            case "grant":
                self.store.grant_slots()
                self.follow(NextStep(run_id, 0))
            case "cancel":
                cancel_run(self.store, run_id, "enough")
                self.follow(NextStep(run_id, 0))

    @property
    def ended(self) -> bool:
        return all(self.store.read_run(run_id).stop_reason for run_id in RUNS)


@pytest.mark.parametrize("seed", range(24))
def test_every_rule_holds_after_each_act(seed: int) -> None:
    world = World(seed)
    store: Any = world.store
    for number in range(MOST_ACTS):
        if world.ended:
            break
        late = number > MOST_ACTS // 2
        with contextlib.suppress(CeleriacError):
            world.act(world.choose.choice((*ACTS, "cancel") if late else ACTS))
        for run_id in RUNS:
            assert check_run(store, run_id) == [], f"after act {number}"
    for run_id in RUNS:
        cancel_run(store, run_id, "enough")
        assert check_run(store, run_id) == []
    for name in (keys.slots("crm"), keys.waiting("crm")):
        assert store.redis.zrange(name, 0, -1) == []
    for run_id in RUNS:
        found = replay(read_recording(store, run_id), world.agent)
        assert [each.describe(show=True) for each in found.differences] == []
        assert store.delete_run(run_id) is Outcome.OK
        assert [key for key in store.redis.scan_iter("*") if run_id in key] == []
    world.loop.close()
