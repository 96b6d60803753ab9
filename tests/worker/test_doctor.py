"""`celeriac doctor` against real servers and workers: each finding, its verdict and its cure."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import keys
from runner.connection import connect
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import RunStore
from support.command import Invoke
from support.fleet import Fleet, fleet, url_of, valkey
from tasks import Client
from worker.control import clock_difference
from worker.doctor import Finding, Verdict, examine, worst
from worker.survey import survey

HOUR = 3600


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server and one worker of each kind, with nothing to do."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "redis").mkdir()
    with valkey(folder / "redis") as server, fleet(url_of(server), folder) as made:
        made.start("steps", name="steps")
        made.start("tools", name="tools", concurrency=1)
        made.wait_for(lambda: "ready" in made.log("steps") and "ready" in made.log("tools"))
        yield made


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[str]:
    """A server of its own for a test that changes how it is set up."""
    with valkey(tmp_path) as server:
        yield url_of(server)


def look(
    url: str, *, patience: float = 0.1, now: float | None = None, **options: object
) -> dict[str, Finding]:
    settings = Settings(redis_url=url, **options)  # type: ignore[arg-type]
    return {each.about: each for each in examine(settings, patience=patience, now=now)}


def verdicts(found: dict[str, Finding]) -> dict[str, str]:
    return {about: str(each.verdict) for about, each in found.items()}


def test_all_is_well_where_it_is(
    working: Fleet, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = invoke("doctor", CELERIAC_REDIS_URL=working.redis_url, CELERIAC_AGENTS="support.agents")

    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert {line.split()[0] for line in lines} == {"ok"}
    about = {line[6:22].strip(): line[23:] for line in lines}
    assert set(about) == {
        "agents",
        "configuration",
        "redis",
        "redis memory",
        "eviction",
        "persistence",
        "clock",
        "steps workers",
        "tools workers",
        "versions",
        "announced",
        STEPS_QUEUE,
        TOOLS_QUEUE,
        "due",
    }
    assert "a canary took" in about["steps workers"]
    assert about["redis"].startswith("Valkey 9.")
    assert "2 with celeriac" in about["versions"]
    assert "helper" in about["announced"]


def test_a_script_is_given_the_same_as_json(working: Fleet, invoke: Invoke) -> None:
    ran = invoke("doctor", "--json", CELERIAC_REDIS_URL=working.redis_url)

    found = json.loads(ran.out)
    assert (ran.code, found["verdict"]) == (0, "ok")
    assert found["findings"][0] == {
        "about": "agents",
        "verdict": "ok",
        "text": "CELERIAC_AGENTS isn't set here, which only a worker needs",
        "todo": "",
    }


def test_an_agent_that_no_worker_has_and_one_of_other_code_are_told(
    working: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "newer_agents.py").write_text(
        "from runner import Agent\n"
        'helper = Agent(name="helper", instructions="Help otherwise.")\n'
        'newest = Agent(name="newest")\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    found = look(working.redis_url, patience=2, agents=("newer_agents",))

    assert found["agents"].verdict is Verdict.OK
    assert found["announced"].verdict is Verdict.BAD
    assert found["announced"].text == "no worker knows newest"
    assert "CELERIAC_AGENTS" in found["announced"].todo
    assert found["agents' code"].verdict is Verdict.WARN
    assert found["agents' code"].text == "not the same everywhere: helper"


def test_agents_that_cant_be_imported_are_told_with_the_reason(
    working: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_agents.py").write_text("import no_such_module_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    found = look(working.redis_url, patience=2, agents=("broken_agents",))

    assert found["agents"].verdict is Verdict.BAD
    assert "no_such_module_here" in found["agents"].text
    assert found["steps workers"].verdict is Verdict.OK


def test_a_fleet_without_workers_is_told_what_to_start(alone: str) -> None:
    found = look(alone)

    assert {found[name].verdict for name in ("steps workers", "tools workers")} == {Verdict.BAD}
    assert "celeriac worker --queue tools" in found["tools workers"].todo
    assert found["announced"].verdict is Verdict.WARN


def test_a_worker_that_answers_and_takes_no_task_is_deaf(working: Fleet) -> None:
    with Client(settings=working.settings) as client:
        stats = client._app.control.inspect(timeout=5, limit=2).stats()
    [child] = next(each["pool"]["processes"] for name, each in stats.items() if "tools" in name)
    os.kill(child, signal.SIGSTOP)
    try:
        found = look(working.redis_url, patience=2)
    finally:
        os.kill(child, signal.SIGCONT)

    assert found["tools workers"].verdict is Verdict.WARN
    assert "none took a canary" in found["tools workers"].text
    assert found["steps workers"].verdict is Verdict.OK


def test_a_setting_that_breaks_a_promise_is_told_and_no_worker_is_asked(
    working: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://127.0.0.1:1/0")

    found = look(working.redis_url, patience=2)

    assert found["configuration"].verdict is Verdict.BAD
    assert "CELERY_BROKER_URL" in found["configuration"].text
    assert "use CELERIAC_BROKER_URL" in found["configuration"].todo


def test_a_redis_that_is_away_ends_the_examination(invoke: Invoke) -> None:
    ran = invoke("doctor", CELERIAC_REDIS_URL="redis://:planted@127.0.0.1:1/0")

    assert (ran.code, ran.err) == (3, "")
    last = ran.out.splitlines()[-1]
    assert last.startswith("away  redis")
    assert "127.0.0.1:1/0 doesn't answer" in last
    assert "CELERIAC_REDIS_URL" in last
    assert "planted" not in ran.out


def test_a_broker_that_is_away_is_told_apart(alone: str) -> None:
    found = look(alone, broker_url="redis://127.0.0.1:1/0")

    assert (found["redis"].verdict, found["broker"].verdict) == (Verdict.OK, Verdict.AWAY)
    assert "CELERIAC_BROKER_URL" in found["broker"].todo
    assert "due" not in found


def test_how_the_server_is_set_up_is_told_with_the_cure(alone: str) -> None:
    admin = connect(alone)
    admin.config_set("maxmemory-policy", "allkeys-lru")
    admin.config_set("appendonly", "no")
    used = int(admin.info("memory")["used_memory"])
    admin.config_set("maxmemory", int(used * 0.9))

    found = look(alone)

    assert found["eviction"].verdict is Verdict.BAD
    assert "set maxmemory-policy noeviction" in found["eviction"].todo
    assert found["persistence"].verdict is Verdict.WARN
    assert "set appendonly yes" in found["persistence"].todo
    assert found["redis memory"].verdict is Verdict.BAD
    assert "celeriac prune" in found["redis memory"].todo
    assert "can't be asked" in found["workers"].text
    assert worst(found.values()) is Verdict.BAD
    admin.close()


@pytest.mark.parametrize(("ahead", "verdict"), [(0.0, "ok"), (5.0, "warn"), (-5.0, "warn")])
def test_a_clock_that_differs_from_redis_is_told(alone: str, ahead: float, verdict: str) -> None:
    found = look(alone, now=time.time() + ahead)

    assert str(found["clock"].verdict) == verdict
    assert abs(float(found["clock"].text.split()[0]) - ahead) < 0.9


def test_what_waits_is_told_with_its_age(alone: str) -> None:
    with Client(settings=Settings(redis_url=alone)) as client:
        run = client.submit("wait", agent="helper", metadata={})
        admin = client.store.redis
        now = float(admin.time()[0])
        admin.hset(keys.run(run.id), "hinted", int((now - HOUR) * 1000))
        admin.zadd(keys.DUE, {run.id: (now - HOUR) * 1000})
        admin.sadd(keys.CROWDED, "crm")
        admin.zadd(keys.waiting("crm"), {f"{run.id}.0.0": (now - HOUR) * 1e6})
        admin.zadd(keys.slots("crm"), {"somebody": (now + HOUR) * 1000, "gone": 1})

        found = look(alone)
        seen = survey(RunStore(client.store.settings))

    assert found[STEPS_QUEUE].verdict is Verdict.WARN
    assert found[STEPS_QUEUE].text.startswith("1 hints wait, the first for 360")
    assert "start more steps workers" in found[STEPS_QUEUE].todo
    assert found[TOOLS_QUEUE].text == "empty"
    assert found["limit crm"].verdict is Verdict.WARN
    assert "places taken: 1" in found["limit crm"].text
    assert found["due"].verdict is Verdict.BAD
    assert run.id in found["due"].text
    assert (seen.live_runs, seen.limits[0].used, seen.limits[0].waiting) == (1, 1, 1)


def test_the_clock_is_compared_in_seconds(alone: str) -> None:
    store = RunStore(Settings(redis_url=alone))
    assert abs(clock_difference(store, time.time() + HOUR) - HOUR) < 1
    store.close()


def test_several_versions_at_once_are_told(alone: str) -> None:
    from worker.doctor import _look_at_versions

    now, before = ({"celeriac": version, "celery": "5.7.0"} for version in ("0.2.0", "0.1.0"))
    found = _look_at_versions({"a": now, "b": before, "c": now, "d": {"error": "unknown command"}})

    assert found.verdict is Verdict.WARN
    assert "1 with celeriac 0.1.0" in found.text
    assert "2 with celeriac 0.2.0" in found.text
    assert "1 with a celeriac that doesn't tell" in found.text
