"""What `celeriac doctor` looks at: each finding is a line with a verdict, and what to do about it.

Nothing is changed, but for a canary that goes through each queue.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import redis
from kombu.exceptions import OperationalError

from runner.agents import Agents, load_agents
from runner.connection import connect, reporting_redis_errors
from runner.errors import CeleriacError, RedisUnavailable, SettingsError
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import RunStore
from tasks import Client
from worker.app import QUEUES, make_app
from worker.checks import check_configuration
from worker.control import ABOUT, clock_difference, installed_version
from worker.survey import LimitSeen, Survey, limits_of, survey

OLDEST_REDIS = (6, 2)

FULL = 0.8
"""Of the memory that Redis may use: from here on it is time to do something."""

CLOCK = 1.0
"""Seconds by which a clock may differ: runs don't mind, what tools compare with a deadline does."""

SOON = 0.5
"""Seconds that are enough for a worker's answer, unless nobody has answered for some queue."""

LATE = 10.0
"""Seconds after which a due run was forgotten: each worker looks twice a second."""

LONG = 60.0
"""Seconds that a hint or a call may wait before it is worth a word."""


class Verdict(StrEnum):
    """From well to worst; `AWAY`: it doesn't answer, so that nothing more can be asked."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class Finding:
    """`todo` is what to do about it, and empty where all is well."""

    about: str
    verdict: Verdict
    text: str
    todo: str = ""

    def as_dict(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def examine(
    settings: Settings, *, patience: float = 2.0, now: float | None = None
) -> Iterator[Finding]:
    """All findings, in the order in which one would look. It ends early where Redis is away.

    `patience`: seconds that workers have for an answer; `now`: this machine's clock.
    """
    agents, *findings = _look_at_agents(settings)
    yield from findings
    app = None
    try:
        app = make_app(settings, agents)
        check_configuration(app, settings)
    except SettingsError as error:
        message, _, cure = str(error).partition("; ")
        yield Finding("configuration", Verdict.BAD, message, cure)
    else:
        yield Finding("configuration", Verdict.OK, "no setting breaks a promise")
    store = RunStore(settings)
    try:
        servers = list(_look_at_servers(settings))
        yield from servers
        if worst(servers) is Verdict.AWAY:
            return
        yield _look_at_clock("clock", clock_difference(store, now or time.time()))
        # With another broker than ours, whoever answers isn't one of our workers.
        if app is not None:
            yield from _look_at_workers(store, app, agents, patience)
        yield from _look_at_survey(survey(store, limits_of(agents)))
    finally:
        store.close()
        if app is not None:
            app.close()


# --- this machine ---------------------------------------------------------------------------------


def _look_at_agents(settings: Settings) -> tuple[Any, ...]:
    if not settings.agents:
        text = "CELERIAC_AGENTS isn't set here, which only a worker needs"
        return Agents(), Finding("agents", Verdict.OK, text)
    try:
        agents = load_agents(settings.agents)
    except CeleriacError as error:
        return Agents(), Finding(
            "agents",
            Verdict.BAD,
            " ".join(str(error).split()),
            "mend the module, or CELERIAC_AGENTS: no worker would start with it",
        )
    return agents, Finding("agents", Verdict.OK, f"importable here: {', '.join(sorted(agents))}")


def _look_at_clock(whose: str, difference: float) -> Finding:
    if abs(difference) <= CLOCK:
        return Finding(whose, Verdict.OK, f"{difference:+.2f} s beside Redis'")
    return Finding(
        whose,
        Verdict.WARN,
        f"{difference:+.2f} s beside Redis'",
        "set it by NTP: runs go by Redis' clock, but a tool that compares its own with "
        "ctx.deadline is wrong",
    )


# --- servers --------------------------------------------------------------------------------------


def _look_at_servers(settings: Settings) -> Iterator[Finding]:
    yield from _look_at_server("redis", settings.redis_url, holds_runs=True)
    if settings.queue_url != settings.redis_url:
        yield from _look_at_server("broker", settings.queue_url, holds_runs=False)


def _look_at_server(name: str, url: str, *, holds_runs: bool) -> Iterator[Finding]:
    client = connect(url)
    try:
        with reporting_redis_errors():
            info: dict[str, Any] = client.info()
    except (RedisUnavailable, redis.RedisError) as error:
        variable = {"redis": "CELERIAC_REDIS_URL", "broker": "CELERIAC_BROKER_URL"}[name]
        yield Finding(
            name,
            Verdict.AWAY,
            f"{_address(url)} doesn't answer: {error}",
            f"start it, or mend {variable}",
        )
        return
    finally:
        client.close()
    yield _look_at_version(name, url, info)
    yield _look_at_memory(name, info)
    if holds_runs:
        yield _look_at_eviction(info)
        yield _look_at_persistence(info)


def _address(url: str) -> str:
    """Where a server is, without its password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname or '127.0.0.1'}:{parts.port or 6379}{parts.path}"


def _look_at_version(name: str, url: str, info: Mapping[str, Any]) -> Finding:
    server = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    version = str(info.get("valkey_version") or info["redis_version"])
    text = f"{server} {version} at {_address(url)}"
    speaks = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if speaks < OLDEST_REDIS:
        oldest = ".".join(map(str, OLDEST_REDIS))
        return Finding(name, Verdict.BAD, text, f"upgrade it to {oldest} or newer")
    return Finding(name, Verdict.OK, text)


def _look_at_memory(name: str, info: Mapping[str, Any]) -> Finding:
    used, most = int(info["used_memory"]), int(info["maxmemory"])
    about = f"{name} memory"
    if not most:
        return Finding(about, Verdict.OK, f"{_size(used)} used, no limit set")
    text = f"{_size(used)} of {_size(most)} used"
    if used < FULL * most:
        return Finding(about, Verdict.OK, text)
    return Finding(
        about,
        Verdict.BAD if used >= 0.95 * most else Verdict.WARN,
        text,
        "raise maxmemory, or keep ended runs for less long: celeriac prune, CELERIAC_RETENTION",
    )


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MB"


def _look_at_eviction(info: Mapping[str, Any]) -> Finding:
    policy = str(info["maxmemory_policy"])
    if policy == "noeviction":
        return Finding("eviction", Verdict.OK, "noeviction")
    return Finding(
        "eviction", Verdict.BAD, f"{policy}: runs would vanish", "set maxmemory-policy noeviction"
    )


def _look_at_persistence(info: Mapping[str, Any]) -> Finding:
    if not int(info["aof_enabled"]):
        return Finding(
            "persistence",
            Verdict.WARN,
            "appendonly is off: a restart loses runs",
            "set appendonly yes",
        )
    if str(info.get("aof_last_write_status", "ok")) != "ok":
        return Finding(
            "persistence",
            Verdict.BAD,
            "the append-only file can't be written",
            "look at the server's log and its disk",
        )
    return Finding("persistence", Verdict.OK, "appendonly is on")


# --- workers --------------------------------------------------------------------------------------


def _look_at_workers(
    store: RunStore, app: Any, agents: Agents, patience: float
) -> Iterator[Finding]:
    try:
        told = _ask_workers(app, patience)
    except (OperationalError, redis.RedisError, OSError) as error:
        text = f"they can't be asked: the broker answers {type(error).__name__}"
        yield Finding("workers", Verdict.BAD, text, "look at its memory above, and at its log")
        return
    known = {name: about for name, about in told.items() if "queues" in about}
    with Client(settings=store.settings) as client:
        for queue, name in QUEUES.items():
            yield _look_at_queue(client, queue, name, known, patience)
    if told:
        yield _look_at_versions(told)
        yield from _look_at_fingerprints(known, agents)
    yield from (
        _look_at_clock(f"clock of {name}", about["clock"])
        for name, about in sorted(known.items())
        if abs(about["clock"]) > CLOCK
    )
    yield from _look_at_announced(store, agents)


def _ask_workers(app: Any, patience: float) -> dict[str, Any]:
    """What each worker says of itself. One that is well answers within the first moment."""
    told: dict[str, Any] = {}
    for timeout in (min(SOON, patience), patience):
        for reply in app.control.broadcast(ABOUT, reply=True, timeout=timeout) or []:
            told |= reply
        if set(QUEUES.values()) <= {
            name for each in told.values() for name in each.get("queues", ())
        }:
            break
    return told


def _look_at_queue(
    client: Client, queue: str, name: str, known: Mapping[str, Any], patience: float
) -> Finding:
    serving = sorted(worker for worker, about in known.items() if name in about["queues"])
    start = f"celeriac worker --queue {queue}"
    about = f"{queue} workers"
    if not serving:
        return Finding(about, Verdict.BAD, f"nobody serves {name}", f"start one: {start}")
    seconds = client.ping(queue, timeout=patience)
    if seconds is None:
        return Finding(
            about,
            Verdict.WARN,
            f"{', '.join(serving)} serve {name}, but none took a canary within {patience:g} s",
            f"all are busy or deaf: start more ({start}), and look at their logs",
        )
    return Finding(
        about, Verdict.OK, f"{', '.join(serving)}; a canary took {seconds * 1000:.0f} ms"
    )


def _look_at_versions(told: Mapping[str, Any]) -> Finding:
    counted = Counter(_version_of(about) for about in told.values())
    text = ", ".join(f"{count} with {version}" for version, count in sorted(counted.items()))
    if len(counted) > 1:
        return Finding(
            "versions",
            Verdict.WARN,
            f"side by side: {text}",
            "well for as long as a deployment takes; then restart those left behind",
        )
    here = installed_version()
    return Finding("versions", Verdict.OK, f"{text}; here celeriac {here}")


def _version_of(about: Mapping[str, Any]) -> str:
    if "celeriac" not in about:
        return "a celeriac that doesn't tell"
    return f"celeriac {about['celeriac']} on Celery {about['celery']}"


def _look_at_fingerprints(known: Mapping[str, Any], agents: Agents) -> Iterator[Finding]:
    """Whether the same agent is the same everywhere."""
    found: dict[str, set[str]] = defaultdict(set)
    for about in known.values():
        for name, fingerprint in about["agents"].items():
            found[name].add(fingerprint)
    for name, agent in agents.items():
        if name in found:
            found[name].add(agent.fingerprint)
    if differing := sorted(name for name, prints in found.items() if len(prints) > 1):
        yield Finding(
            "agents' code",
            Verdict.WARN,
            f"not the same everywhere: {', '.join(differing)}",
            "deploy the same code to all workers, and here",
        )


def _look_at_announced(store: RunStore, agents: Agents) -> Iterator[Finding]:
    announced = set(store.read_agents())
    if missing := sorted(set(agents) - announced):
        yield Finding(
            "announced",
            Verdict.BAD,
            f"no worker knows {', '.join(missing)}",
            "restart the workers, with the code and the CELERIAC_AGENTS of here, or runs of these "
            "end CONFIG_ERROR",
        )
    elif announced:
        yield Finding("announced", Verdict.OK, f"by workers: {', '.join(sorted(announced))}")
    else:
        yield Finding(
            "announced",
            Verdict.WARN,
            "no worker has announced an agent",
            "start workers; until then a submit needs CELERIAC_AGENTS, to check the name",
        )


# --- what waits -----------------------------------------------------------------------------------


def _look_at_survey(seen: Survey) -> Iterator[Finding]:
    for queue in seen.queues:
        yield _waiting(
            queue.name,
            queue.depth,
            "hints",
            queue.wait,
            f"start more {_short(queue.name)} workers, or give them more --concurrency",
        )
    for limit in seen.limits:
        if limit.waiting:
            yield _look_at_limit(limit)
    if seen.overdue < LATE:
        yield Finding("due", Verdict.OK, f"nothing is late; {seen.live_runs} runs haven't ended")
    else:
        yield Finding(
            "due",
            Verdict.BAD,
            f"run {seen.overdue_run} was due {seen.overdue:.0f} s ago, and nobody looked",
            "start a worker: each of them recovers runs",
        )


def _look_at_limit(limit: LimitSeen) -> Finding:
    return _waiting(
        f"limit {limit.name}",
        limit.waiting,
        f"calls or steps (places taken: {limit.used})",
        limit.oldest,
        "raise the limit, if what is behind it bears more",
    )


def _waiting(about: str, count: int, what: str, oldest: float, todo: str) -> Finding:
    if not count:
        return Finding(about, Verdict.OK, "empty")
    text = f"{count} {what} wait, the first for {oldest:.0f} s"
    if oldest < LONG:
        return Finding(about, Verdict.OK, text)
    return Finding(about, Verdict.WARN, text, todo)


def _short(queue: str) -> str:
    return {STEPS_QUEUE: "steps", TOOLS_QUEUE: "tools"}[queue]


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on all of them together."""
    found = {each.verdict for each in findings}
    return next((each for each in reversed(Verdict) if each in found), Verdict.OK)
