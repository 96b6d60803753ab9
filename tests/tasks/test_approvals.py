"""Approvals and permissions on real workers: who decides, what runs, and who sees which run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from runner import (
    AlreadyDecided,
    InvalidInput,
    PermissionDenied,
    Principal,
    RunFinished,
    RunNotFound,
    RunStatus,
    StopReason,
)
from runner.agents import Agents
from runner.invariants import check_run
from support import agents
from support.model_server import calls
from support.stage import Stage, by_turn, open_stage
from tasks import Client, Run
from worker import cli

Call = tuple[str, dict[str, Any]]

LARGE: Call = ("charge", {"account_id": 1, "cents": 500})
LARGER: Call = ("charge", {"account_id": 2, "cents": 600})
SMALL: Call = ("charge", {"account_id": 1, "cents": 5})
PING: Call = ("ping", {})
ACME = Principal(id="u1", tenant="acme", scopes=frozenset({"accounts:write"}))
OTHER = Principal(id="u9", tenant="other", scopes=frozenset({"admin"}))


def gated(stage: Stage, *turn: Call, agent: str = "guarded") -> Run:
    """A run that waits for an approval, after all its other calls."""
    run = stage.submit([calls(*(turn or (PING, LARGE)))], agent=agent)
    stage.fleet.wait_for(lambda: run.status() is RunStatus.WAITING)
    return run


def ran(stage: Stage, run: Run, tool: str) -> list[str]:
    return [line for line in stage.fleet.ledger if line.startswith(f"{tool} {run.id}.")]


# --- approvals ---------------------------------------------------------------------------------


def test_a_call_runs_once_it_is_approved_and_the_model_reads_its_result(stage: Stage) -> None:
    run = gated(stage, PING, LARGE, SMALL)
    [shown] = run.approvals()
    assert (shown.call_id, shown.tool) == ("0.1", "charge")
    assert shown.arguments == {"account_id": 1, "cents": 500}
    assert (len(ran(stage, run, "charge")), len(ran(stage, run, "ping"))) == (1, 1)

    run.approve("0.1", digest=shown.digest, by="ops")

    assert run.result(timeout=20).answer == "done"
    assert stage.results(run) == ["pong", "charged 500", "charged 5"]
    told = [(each.type, each.data) for each in run.events() if each.type.startswith("approval")]
    assert told == [
        ("approval.requested", {"tool": "charge", "digest": shown.digest}),
        ("approval.decided", {"approved": True, "by": "ops"}),
    ]
    assert check_run(stage.client.store, run.id) == []


def test_a_denied_call_never_runs_and_the_run_goes_on(stage: Stage) -> None:
    run = gated(stage)
    run.deny("0.1", "not without an order")
    assert run.result(timeout=20).ok
    assert "not without an order" in stage.results(run)[1]
    assert ran(stage, run, "charge") == []
    with pytest.raises(AlreadyDecided, match=r"call 0\.1 was already denied"):
        run.approve("0.1")
    assert check_run(stage.client.store, run.id) == []


def test_a_decision_without_words_or_on_nothing_is_refused(stage: Stage) -> None:
    run = gated(stage)
    for reason in ("", "  ", None):
        with pytest.raises(InvalidInput, match="empty"):
            run.deny("0.1", reason)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"waiting: 0\.1"):
        run.approve("0.0")
    with pytest.raises(InvalidInput, match="other arguments"):
        run.approve("0.1", digest="0" * 32)
    run.cancel()


def test_what_nobody_decides_in_time_is_denied_by_recovery(stage: Stage) -> None:
    run = stage.submit([calls(("urgent", {}), PING)], agent="guarded")
    assert run.result(timeout=20).ok
    assert "nobody decided in time" in stage.results(run)[0]
    assert ran(stage, run, "urgent") == []
    with pytest.raises(AlreadyDecided, match="nobody decided in time"):
        run.approve("0.0")


def test_a_decision_after_a_cancel_or_the_deadline_comes_too_late(stage: Stage) -> None:
    cancelled = gated(stage)
    cancelled.cancel()
    with pytest.raises(RunFinished, match="already ended CANCELLED"):
        cancelled.approve("0.1")
    late = gated(stage, agent="hasty-guarded")
    assert late.result(timeout=20).stop_reason is StopReason.TIMEOUT
    for decide in (partial(late.approve, "0.1"), partial(late.deny, "0.1", "no")):
        with pytest.raises(RunFinished, match="already ended TIMEOUT"):
            decide()
    assert ran(stage, cancelled, "charge") == ran(stage, late, "charge") == []


@pytest.fixture
def own_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Workers of its own, for a test that ends them."""
    with open_stage(
        tmp_path_factory.mktemp("own"), CELERIAC_LEASE="2", CELERIAC_RENEW_EVERY="0.5"
    ) as made:
        yield made


def test_all_workers_may_end_between_the_request_and_the_decision(own_stage: Stage) -> None:
    stage = own_stage
    turn = calls(PING, LARGE)
    runs = [stage.submit(by_turn([turn]), agent="guarded") for _ in range(3)]
    stage.fleet.wait_for(lambda: {run.status() for run in runs} == {RunStatus.WAITING})
    stage.fleet.kill("steps")
    stage.fleet.kill("tools")
    runs[0].approve("0.1")
    runs[1].deny("0.1", "no")

    stage.fleet.start("steps", name="steps-again")
    stage.fleet.start("tools", name="tools-again")
    stage.fleet.wait_for(lambda: stage.client.ping("tools"))
    runs[2].approve("0.1")

    assert [run.result(timeout=20).ok for run in runs] == [True] * 3
    assert [len(ran(stage, run, "charge")) for run in runs] == [1, 0, 1]
    assert [len(ran(stage, run, "ping")) for run in runs] == [1, 1, 1]
    assert [check_run(stage.client.store, run.id) for run in runs] == [[]] * 3


def test_the_command_line_shows_what_waits_and_decides(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CELERIAC_REDIS_URL", stage.fleet.redis_url)

    def say(*words: str) -> str:
        assert cli.main([*words]) == 0
        return capsys.readouterr().out

    run = gated(stage, LARGE, LARGER)
    shown = say("approvals", run.id)
    assert '0.0  charge {"account_id": 1, "cents": 500}' in shown
    [one, other] = json.loads(say("approvals", run.id, "--json"))
    assert (one["call_id"], other["arguments"]["cents"]) == ("0.0", 600)
    assert one["digest"] in shown

    assert cli.main(["approve", run.id, "0.0", "--digest", other["digest"]]) == 2
    assert "other arguments" in capsys.readouterr().err
    digest = ["--digest", one["digest"]]
    assert say("approve", run.id, "0.0", *digest, "--by", "ops") == f"approved 0.0 of {run.id}\n"
    assert json.loads(say("deny", run.id, "0.1", "too much", "--json")) == {
        "run_id": run.id,
        "call": "0.1",
        "approved": False,
    }
    assert run.result(timeout=20).ok
    assert cli.main(["deny", run.id, "0.0", "too late"]) == 5
    assert "already approved by ops" in capsys.readouterr().err
    assert say("approvals", run.id) == "no call waits for an approval\n"
    assert cli.main(["approvals", "no-such-run"]) == 4
    capsys.readouterr()
    followed = say("events", run.id)
    assert "call 0.0 charge waits for an approval" in followed
    assert "call 0.0 charge approved by ops" in followed
    assert "call 0.1 charge denied" in followed
    assert "600" not in followed


# --- permission --------------------------------------------------------------------------------


def test_a_tool_runs_for_who_may_and_is_an_error_for_who_may_not(stage: Stage) -> None:
    turn = calls(("close_account", {"account_id": 7}))
    may = stage.submit([turn], agent="guarded", principal=ACME)
    may_not = stage.submit([turn], agent="guarded", principal=OTHER)
    assert (may.result(timeout=20).ok, may_not.result(timeout=20).ok) == (True, True)
    assert stage.results(may) == ["closed"]
    [refused] = stage.results(may_not)
    assert "accounts:write" in refused
    assert ran(stage, may, "close_account") == [f"close_account {may.id}.0.0 u1"]
    assert ran(stage, may_not, "close_account") == []


def test_an_agent_is_refused_at_submit_by_what_the_workers_announce(stage: Stage) -> None:
    before = len(stage.client.list(limit=1000))
    for principal in (None, ACME):
        with pytest.raises(PermissionDenied, match="agent closed needs the permission admin"):
            stage.client.submit("go", agent="closed", principal=principal)
    assert len(stage.client.list(limit=1000)) == before
    assert stage.submit([], agent="closed", principal=OTHER).result(timeout=20).ok


def test_an_agent_is_refused_at_submit_by_what_the_client_knows_itself(stage: Stage) -> None:
    settings = stage.fleet.settings
    with (
        Client(settings=settings, agents=Agents([agents.closed])) as client,
        pytest.raises(PermissionDenied, match="admin"),
    ):
        client.submit("go", agent="closed")


def test_a_start_from_a_plain_app_is_refused_likewise(stage: Stage) -> None:
    app, run_id = stage.client._app, "start-without-admin"
    start = {"goal": "go", "agent": "closed", "principal": {"id": "u1"}}
    app.send_task("celeriac.start", kwargs=start, task_id=run_id, queue="celeriac.steps")
    refused = f"run={run_id} is refused: agent closed needs the permission admin"
    stage.fleet.wait_for(lambda: refused in stage.fleet.log("steps"))
    told(lambda: stage.client.get(run_id))


def test_a_run_that_got_past_submit_ends_at_its_first_step(stage: Stage) -> None:
    """As from a client that asked before the workers announced what the agent needs."""
    store = stage.client.store
    store.create_run(
        run_id="run-past-submit",
        agent="closed",
        messages=[{"role": "user", "content": "go"}],
        limits=agents.closed.limits,
    )
    result = stage.client.get("run-past-submit").result(timeout=20)
    assert result.stop_reason is StopReason.PERMISSION_DENIED
    assert result.usage.requests == 0
    assert check_run(store, "run-past-submit") == []


# --- tenants -----------------------------------------------------------------------------------


def told(act: Callable[[], object]) -> str:
    with pytest.raises(RunNotFound) as error:
        act()
    return str(error.value)


def test_another_tenants_run_is_none(stage: Stage) -> None:
    run = stage.submit([], agent="guarded", principal=ACME)
    assert run.result(timeout=20).ok
    stranger = stage.client.for_principal(OTHER)
    unknown = told(lambda: stranger.get("no-such-run"))
    assert told(lambda: stranger.get(run.id)) == unknown.replace("no-such-run", run.id)
    assert run.id not in {each.id for each in stranger.list(limit=1000)}
    colleague = stage.client.for_principal({"id": "u2", "tenant": "acme"})
    assert colleague.get(run.id).result(timeout=5).ok
    assert run.id in {each.id for each in colleague.list(limit=1000)}
    assert run.id in {each.id for each in stage.client.list(limit=1000)}


def test_a_run_of_nobody_belongs_to_no_tenant(stage: Stage) -> None:
    run = stage.submit([], agent="guarded")
    told(lambda: stage.client.for_principal(ACME).get(run.id))
    assert stage.client.get(run.id).result(timeout=20).ok


def test_a_client_for_somebody_submits_and_decides_in_that_name(stage: Stage) -> None:
    client = stage.client.for_principal(ACME)
    stage.script("charge acme", [calls(LARGE)])
    run = client.submit("charge acme", agent="guarded", idempotency_key="acme-1")
    assert stage.client.store.read_run(run.id).principal == ACME
    stage.fleet.wait_for(run.approvals)
    with pytest.raises(PermissionDenied, match="in that name"):
        run.approve("0.0", by="u2")

    client.get(run.id).approve("0.0")

    assert run.result(timeout=20).ok
    [decided] = [each for each in run.events() if each.type == "approval.decided"]
    assert decided.data == {"approved": True, "by": "u1"}
    assert client.submit("x", agent="guarded", idempotency_key="acme-1").id == run.id


def test_a_client_for_somebody_acts_for_nobody_else(stage: Stage) -> None:
    client = stage.client.for_principal(ACME)
    with pytest.raises(PermissionDenied, match="acts for another principal"):
        client.submit("go", agent="guarded", principal=OTHER)
    with pytest.raises(PermissionDenied, match="acts for another principal"):
        client.for_principal(OTHER)
    assert client.for_principal(ACME).principal == ACME
    assert stage.client.principal is None
    with pytest.raises(InvalidInput, match="principal takes id and tenant"):
        stage.client.for_principal({"name": "u1"})


def test_a_client_is_made_for_somebody_from_the_start(stage: Stage) -> None:
    with Client(settings=stage.fleet.settings, principal=ACME) as client:
        run = client.submit("go", agent="guarded")
        assert client.get(run.id).result(timeout=20).ok
        with Client(settings=stage.fleet.settings, principal=OTHER) as stranger:
            told(lambda: stranger.get(run.id))
