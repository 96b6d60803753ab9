"""Whatever order decisions, hints and recovery come in, each call is decided once and runs once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import check_keys
from runner import Agent, AlreadyDecided, InvalidInput, Limits, RunFinished, StopReason, tool
from runner.agents import Agents
from runner.context import goal_message
from runner.invariants import check_run
from runner.loop import Loop, approve_call, deny_call
from runner.settings import Settings
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support.fleet import url_of

numbers = itertools.count()
ran: Counter[int] = Counter()
"""How often the body of each call was entered."""


@tool(idempotent=True)
def look(n: int) -> str:
    """Look somewhere."""
    ran[n] += 1
    return f"saw {n}"


@tool(approval=True)
def pay(n: int) -> str:
    """Pay money."""
    ran[n] += 1
    return f"paid {n}"


@pytest.fixture(params=["fakeredis", "valkey"])
def store(request: pytest.FixtureRequest) -> Iterator[RunStore]:
    if request.param == "fakeredis":
        made = RunStore(Settings(), fakeredis.FakeRedis(decode_responses=True))
    else:
        made = RunStore(Settings(redis_url=url_of(request.getfixturevalue("server"))))
    made.redis.flushdb()
    yield made
    check_keys(made.redis)
    made.close()


Operation = tuple[str, int]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[str], int, list[Operation]]:
    """The tools that a turn calls, how many at once, and what happens then."""
    tools = draw(st.lists(st.sampled_from(["look", "pay"]), min_size=1, max_size=5))
    index = st.integers(0, len(tools) - 1)
    kinds = st.sampled_from(["hint", "approve", "deny", "recover"])
    return tools, draw(st.integers(1, 3)), draw(st.lists(st.tuples(kinds, index), max_size=15))


@given(plans())
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_order_of_decisions_and_hints_decides_and_runs_each_call_once(
    store: RunStore, plan: tuple[list[str], int, list[Operation]]
) -> None:
    tools, parallel, operations = plan
    run, limits = f"run-number-{next(numbers)}", Limits(max_parallel_calls=parallel)
    model = ScriptedModel([calls(*((each, {"n": n}) for n, each in enumerate(tools))), "done"])
    agent = Agent(name="a", model=model, tools=[look, pay], limits=limits)
    store.create_run(run_id=run, agent="a", messages=[goal_message("go")], limits=limits)
    loop = Loop(store, Agents([agent]), settings=store.settings)
    ran.clear()
    loop.advance(run, 0)

    decided: dict[int, str] = {}
    acts: dict[str, Callable[[int], object]] = {
        "hint": lambda index: loop.call_tool(run, 0, index),
        "recover": lambda _: loop.recover(run),
        "approve": lambda index: approve_call(store, run, f"0.{index}"),
        "deny": lambda index: deny_call(store, run, f"0.{index}", "no"),
    }
    rest = [(kind, n) for kind in ("approve", "hint") for n in range(len(tools))]
    # Held calls get their turn as others end, so the hints go round once for each.
    for kind, index in [*operations, *rest, *(rest[len(tools) :] * len(tools))]:
        try:
            acts[kind](index)
            if kind in ("approve", "deny"):
                assert tools[index] == "pay"
                assert index not in decided, "decided twice"
                decided[index] = kind
        except AlreadyDecided:
            assert index in decided
        except (InvalidInput, RunFinished):
            assert tools[index] == "look"
        assert check_run(store, run) == []

    assert loop.advance(run, 1) is not None
    loop.close()
    assert store.read_run(run).stop_reason is StopReason.COMPLETED
    assert check_run(store, run) == []
    told = [each["content"] for each in store.read_messages(run) if each["role"] == "tool"]
    for index, (name, content) in enumerate(zip(tools, told, strict=True)):
        denied = decided.get(index) == "deny"
        assert ran[index] == (0 if denied else 1)
        assert ("DENIED" in content) is denied
        assert denied or content == f"{'saw' if name == 'look' else 'paid'} {index}"
    assert set(decided) == {n for n, name in enumerate(tools) if name == "pay"}
