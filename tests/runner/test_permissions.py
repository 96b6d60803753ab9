"""What a principal may not do is refused before anything runs, and the identity stays outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runner import Agent, Context, Principal, StopReason, keys, tool
from runner.agents import Agents
from runner.context import goal_message
from runner.decide import decide_calls
from runner.errors import AgentError
from runner.loop import Finish, Loop
from runner.models import Limits, ProposedCall, ToolErrorType
from runner.store import RunStore
from runner.testing import ScriptedModel, calls, run_agent
from support.loops import RUN, Loops, drive, open_loops

WRITER = Principal(id="u1", tenant="acme", scopes=frozenset({"refunds:write", "refunds:read"}))
READER = Principal(id="u2", tenant="acme", scopes=frozenset({"refunds:read"}))

ran: list[str] = []


@tool(requires={"refunds:write", "refunds:read"})
def refund(ctx: Context, order_id: str) -> str:
    """Pay money back."""
    ran.append(order_id)
    return f"refunded by {ctx.principal.id if ctx.principal else 'nobody'}"


@tool(idempotent=True)
def look() -> str:
    """Look somewhere."""
    return "seen"


REFUND = ("refund", {"order_id": "A001"})
LOOK: tuple[str, dict[str, Any]] = ("look", {})


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


def agent_of(*turns: Any, tools: Any = (refund, look), **options: Any) -> Agent:
    model = ScriptedModel([calls(*turn) if isinstance(turn, list) else turn for turn in turns])
    return Agent(name="a", model=model, tools=tools, **options)


def requests_of(agent: Agent) -> list[Any]:
    assert isinstance(agent.model, ScriptedModel)
    return agent.model.requests


def told(agent: Agent) -> list[str]:
    return [m["content"] for m in requests_of(agent)[-1].messages if m["role"] == "tool"]


def start(loops: Loops, agent: Agent, principal: Principal | None) -> Loop:
    loops.store.create_run(
        run_id=RUN,
        agent=agent.name,
        messages=[goal_message("go")],
        limits=agent.limits,
        principal=principal,
    )
    return loops.open(agent)


# --- a tool ------------------------------------------------------------------------------------


def test_a_principal_with_the_scopes_may_call_the_tool_which_sees_who_it_is() -> None:
    agent = agent_of([REFUND], "done")
    assert run_agent(agent, "go", principal=WRITER).ok
    assert told(agent) == ["refunded by u1"]


@pytest.mark.parametrize(
    ("principal", "missing"),
    [
        (READER, "needs the permission refunds:write,"),
        (None, "needs the permission refunds:read, refunds:write,"),
        (Principal(id="u3", scopes=frozenset({"refunds", "refunds:write:all"})), "refunds:read"),
    ],
    ids=["some", "nobody", "similar"],
)
def test_a_call_without_the_scopes_is_an_error_that_names_them_and_its_siblings_run(
    principal: Principal | None, missing: str
) -> None:
    agent = agent_of([REFUND, LOOK], "done")
    result = run_agent(agent, "go", principal=principal)
    assert result.ok
    assert ran == []
    refused, seen = told(agent)
    assert ('"type":"PERMISSION_DENIED"' in refused, missing in refused) == (True, True)
    assert seen == "seen"


def test_the_model_is_told_nothing_of_who_asks() -> None:
    agent = agent_of([REFUND], "done")
    run_agent(agent, "go", principal=WRITER)
    text = repr(requests_of(agent)[0])
    assert [word for word in ("u1", "acme", "refunds:") if word in text] == []


def proposed(name: str, arguments: str) -> ProposedCall:
    return ProposedCall(provider_id="c", name=name, arguments=arguments)


@tool(requires={"admin"}, approval=True, max_calls=1)
def wipe(everything: bool) -> None:
    """Wipe the disk."""


@pytest.mark.parametrize(
    ("name", "arguments", "scopes", "used", "expected"),
    [
        ("wipes", "{}", (), 1, ToolErrorType.UNKNOWN_TOOL),
        ("wipe", "{}", (), 1, ToolErrorType.INVALID_ARGUMENT),
        ("wipe", '{"everything": true}', (), 1, ToolErrorType.PERMISSION_DENIED),
        ("wipe", '{"everything": true}', ("admin",), 1, ToolErrorType.CALL_LIMIT),
        ("wipe", '{"everything": true}', ("admin",), 0, None),
    ],
)
def test_the_checks_of_a_call_come_in_their_order(
    name: str, arguments: str, scopes: tuple[str, ...], used: int, expected: str | None
) -> None:
    [call] = decide_calls(
        agent_of(tools=[wipe]),
        (proposed(name, arguments),),
        step=0,
        limits=Limits(),
        used=used,
        used_by_tool={"wipe": used},
        principal=Principal(id="u", scopes=frozenset(scopes)),
    )
    assert (call.decision.error.type if call.decision.error else None) == expected
    assert call.needs_approval is (expected is None)


def test_a_call_that_is_denied_uses_up_nothing() -> None:
    call = proposed("refund", '{"order_id": "A"}')
    one, other = decide_calls(
        agent_of(),
        (call, proposed("look", "{}")),
        step=0,
        limits=Limits(max_tool_calls=1),
        used=0,
        principal=READER,
    )
    assert one.decision.error is not None
    assert other.decision.error is None


# --- an agent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("principal", [None, READER], ids=["nobody", "reader"])
def test_a_run_of_an_agent_that_its_principal_may_not_use_ends_before_the_model_is_asked(
    loops: Loops, principal: Principal | None
) -> None:
    agent = agent_of([LOOK], "done", requires={"refunds:write"})
    loop = start(loops, agent, principal)
    assert drive(loop) == Finish(RUN, StopReason.PERMISSION_DENIED)
    assert requests_of(agent) == []
    result = loops.result
    assert (result.ok, result.steps, result.usage.requests) == (False, 0, 0)
    assert result.error is not None
    assert result.error.type == "PERMISSION_DENIED"
    assert "agent a needs the permission refunds:write" in result.error.message


def test_a_principal_with_the_scopes_may_use_the_agent(loops: Loops) -> None:
    loop = start(loops, agent_of("done", requires=["refunds:write"]), WRITER)
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)


def test_a_single_text_is_no_set_of_scopes() -> None:
    with pytest.raises(AgentError, match="requires is a set of scopes"):
        Agent(name="a", requires="admin")
    assert Agent(name="a", requires=["admin"]).requires == {"admin"}


# --- what clients are told ---------------------------------------------------------------------


def test_an_agents_requirements_stand_in_the_catalog_beside_its_limits(store: RunStore) -> None:
    limits = {"open": Limits(), "closed": Limits(max_steps=3)}
    store.publish_agents(limits, {"closed": frozenset({"admin"})})
    assert store.read_agents() == limits
    assert store.read_agent("closed") == (limits["closed"], frozenset({"admin"}))
    assert store.read_agent("open") == (limits["open"], frozenset())
    assert store.read_agent("unknown") == (None, frozenset())


def test_a_catalog_of_an_older_worker_asks_for_nothing(store: RunStore) -> None:
    store.redis.hset(keys.AGENTS, "old", Limits().model_dump_json())
    assert store.read_agent("old") == (None, frozenset()), "nor is it up any more"


def test_a_tenants_list_is_as_if_there_were_no_other_runs(store: RunStore) -> None:
    for n in range(30):
        tenant = "acme" if n in (0, 20) else "other"
        store.create_run(
            run_id=f"run-number-{n:02}",
            agent="a",
            messages=[goal_message("go")],
            principal=Principal(id="u", tenant=tenant),
        )
    store.create_run(run_id="run-of-nobody", agent="a", messages=[goal_message("go")])
    listed = [each.run_id for each in store.list_runs(2, tenant="acme")]
    assert listed == ["run-number-20", "run-number-00"]
    assert [each.run_id for each in store.list_runs(5, tenant="")] == ["run-of-nobody"]
    assert len(list(store.list_runs(100))) == 31


def test_a_list_reads_on_where_a_tenants_runs_stand_far_behind(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.store.PAGE", 2)
    for n in range(7):
        store.create_run(
            run_id=f"run-number-{n}",
            agent="a",
            messages=[goal_message("go")],
            principal=Principal(id="u", tenant="acme" if n < 3 else "other"),
        )
    listed = [each.run_id for each in store.list_runs(9, tenant="acme")]
    assert listed == ["run-number-2", "run-number-1", "run-number-0"]


def test_agents_of_one_name_differ_by_what_they_require_and_by_nothing_the_model_reads() -> None:
    one, other = agent_of("x"), agent_of("x", requires={"admin"})
    assert one.fingerprint == other.fingerprint
    with pytest.raises(AgentError, match="two agents"):
        Agents([one, other])
