"""Limits across the fleet as a user writes them, and what they do to a run in the loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runner import Agent, Limits, Retry, keys, tool
from runner.agents import Agents
from runner.errors import AgentError, ModelError, SettingsError, ToolDefinitionError
from runner.limits import name_endpoint, read_rate, write_limits
from runner.loop import CallTools, Loop, NextStep, Skip, Wait
from runner.models import RunErrorType
from runner.settings import Settings
from runner.store import Outcome, RunStore
from runner.testing import ScriptedModel, calls
from runner.tools import Tool
from support.loops import RUN, Loops, drive, open_loops


@pytest.fixture
def opened(store: RunStore) -> Iterator[Loops]:
    yield from open_loops(store)


def make_tool(name: str, **options: object) -> Tool:
    def body() -> str:
        """Answer."""
        return name

    body.__name__ = name
    made: Tool = tool(**options)(body)  # type: ignore[call-overload]
    return made


# --- what a user writes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({}, ""),
        ({"max_concurrency": 5}, "read=5"),
        ({"max_concurrency": 5, "limit": "crm"}, "crm=5"),
        ({"rate": "10/s"}, "rate.read=10/1000"),
        ({"rate": "100/m", "limit": "crm"}, "rate.crm=100/60000"),
        ({"rate": "5/h", "max_concurrency": 2}, "read=2,rate.read=5/3600000"),
    ],
)
def test_the_options_of_a_tool_name_its_limits(options: dict[str, object], written: str) -> None:
    assert write_limits(make_tool("read", **options).limits) == written


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_concurrency": True}, "max_concurrency"),
        ({"limit": "crm"}, "limit needs max_concurrency= or rate="),
        ({"limit": "a b", "max_concurrency": 1}, "limit"),
        ({"limit": "crm\n", "max_concurrency": 1}, "limit"),
        ({"rate": "ten a second"}, "10/s"),
        ({"rate": "0/s"}, "10/s"),
    ],
)
def test_options_that_mean_nothing_are_refused_with_the_cure(
    options: dict[str, object], fault: str
) -> None:
    with pytest.raises(ToolDefinitionError, match=fault):
        make_tool("read", **options)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"max_concurrency": 5}, {"max_concurrency": 6}),
        ({"rate": "5/s"}, {"rate": "5/m"}),
    ],
)
def test_tools_that_share_a_limit_must_agree_on_it_when_agents_are_loaded(
    one: dict[str, object], other: dict[str, object]
) -> None:
    tools = [make_tool("read", limit="crm", **one), make_tool("write", limit="crm", **other)]
    agents = [Agent(name=f"a{n}", tools=[each]) for n, each in enumerate(tools)]

    with pytest.raises(AgentError, match="limit 'crm' different sizes"):
        Agents(agents)
    assert len(Agents(agents[:1])) == 1


def test_agents_of_one_model_must_agree_on_its_limit() -> None:
    agents = [Agent(name=f"a{n}", model="m", model_concurrency=n) for n in (1, 2)]
    with pytest.raises(AgentError, match="two agents give model 'm' different limits"):
        Agents(agents)
    with pytest.raises(AgentError, match="model_concurrency must be 1 or more"):
        Agent(name="none", model_concurrency=0)


def test_a_rate_is_so_many_starts_within_a_period() -> None:
    assert [read_rate(text) for text in ("10/s", "1/m", "999999/h")] == [
        "10/1000",
        "1/60000",
        "999999/3600000",
    ]


def test_the_name_of_a_models_limit_holds_nothing_that_limits_are_written_with() -> None:
    assert name_endpoint("host:80", "org/m=1,x") == "host_80.org_m_1_x"
    assert name_endpoint("", "m") == "m"


@pytest.mark.parametrize(
    "name", ["tools_concurrency", "model_requests_per_minute", "model_tokens_per_minute"]
)
def test_a_limit_below_none_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"CELERIAC_{name.upper()} must be 0"):
        Settings.from_env({f"CELERIAC_{name.upper()}": "-1"})


# --- in the loop -------------------------------------------------------------------------------


def test_a_tools_limits_go_with_its_calls_and_let_the_rest_wait(opened: Loops) -> None:
    both = [make_tool("read", limit="crm", max_concurrency=1) for _ in range(1)]
    both.append(make_tool("write", limit="crm", max_concurrency=1))
    model = ScriptedModel([calls(("read", {}), ("write", {})), "done"])
    loop = opened.start(Agent(name="a", tools=both, model=model))

    first = loop.advance(RUN, 0)

    assert first == CallTools(RUN, 0, (0,))
    assert loop.call_tool(RUN, 0, 1) == Skip(RUN, Outcome.PARKED)
    assert loop.call_tool(RUN, 0, 0) == Wait(RUN)
    assert opened.store.granted.popleft() == f"{RUN}.0.1"
    drive(loop, CallTools(RUN, 0, (1,)))
    assert opened.result.answer == "done"
    assert opened.contents() == ["read", "write"]


def test_a_step_waits_without_a_worker_until_its_model_has_a_place(opened: Loops) -> None:
    model = ScriptedModel(["done"])
    agent = Agent(name="a", model=model, model_concurrency=1)
    loop = opened.start(agent)
    limit = f"model.{name_endpoint('', 'ScriptedModel')}"
    redis = opened.store.redis
    redis.zadd(keys.slots(limit), {"somebody.0": 10**15})

    assert loop.advance(RUN, 0) == Wait(RUN)
    assert model.requests == []
    assert opened.record.status == "waiting"

    redis.delete(keys.slots(limit))
    opened.store.grant_slots()
    assert opened.store.granted.popleft() == f"{RUN}.0"
    drive(loop)
    assert opened.result.answer == "done"
    assert redis.exists(keys.slots(limit), keys.waiting(limit)) == 0


def test_a_server_that_asks_one_run_to_wait_makes_all_of_them_wait(store: RunStore) -> None:
    busy = ModelError("busy", type=RunErrorType.RATE_LIMITED, retryable=True, retry_after=30.0)
    model = ScriptedModel([busy])
    agent = Agent(name="a", model=model, model_concurrency=8, model_retry=Retry(max_attempts=2))
    loop = Loop(store, Agents([agent]), settings=store.settings)
    for run_id in ("run-one-0", "run-two-0"):
        store.create_run(
            run_id=run_id,
            agent="a",
            messages=[{"role": "user", "content": "go"}],
            limits=Limits(),
        )

    assert loop.advance("run-one-0", 0) == Wait("run-one-0")
    assert loop.advance("run-two-0", 0) == Wait("run-two-0")

    assert len(model.requests) == 1
    [event] = [e for e in store.read_events("run-two-0", "0") if e.type == "run.waiting"]
    assert event.data == {"reason": "LIMIT", "limit": "model.pace"}
    loop.close()


def test_requests_a_minute_are_counted_over_all_runs(store: RunStore) -> None:
    settings = Settings(model_requests_per_minute=2)
    model = ScriptedModel(["one", "two"])
    loop = Loop(store, Agents([Agent(name="a", model=model)]), settings=settings)
    answers = []
    for number in range(3):
        run_id = f"run-number-{number}"
        store.create_run(
            run_id=run_id,
            agent="a",
            messages=[{"role": "user", "content": "go"}],
            limits=Limits(),
        )
        answers.append(type(loop.advance(run_id, 0)).__name__)

    assert answers == ["Finish", "Finish", "Wait"]
    loop.close()


def test_a_run_without_limits_asks_for_no_admission(opened: Loops) -> None:
    loop = opened.start(Agent(name="a", model=ScriptedModel(["done"])))

    drive(loop, NextStep(RUN, 0))

    assert opened.store.redis.hget(keys.run(RUN), "admitted") is None
