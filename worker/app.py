"""The worker process: its Celery app, and how one for a queue is started."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
from functools import partial
from typing import Any

from celery import Celery, bootsteps

from runner.agents import Agents, load_agents
from runner.errors import RedisUnavailable, SettingsError
from runner.loop import Loop
from runner.observe import Observer
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import RunStore
from tasks.agent import add_tasks
from tasks.hints import CALL_TOOL, let_scripts_send
from tasks.recover import Recoverer
from worker.checks import check_start
from worker.config import HARD_LIMIT_MARGIN, merge_config, worker_config
from worker.consumer import LeaveQueue
from worker.control import answer_about, replace_revoke
from worker.logs import log_as_json
from worker.pool import OneLineOfLoss, StepPool
from worker.shutdown import Drain
from worker.telemetry import Witnesses, make_observer

QUEUES = {"steps": STEPS_QUEUE, "tools": TOOLS_QUEUE}

DEFAULT_POOL = {"steps": "threads", "tools": "prefork"}
"""Steps wait for a model, so threads hold many; tools are users' code, each in its own process."""

POOLS = {"prefork": "worker.pool:ToolPool", "threads": "worker.pool:StepPool", "solo": "solo"}

CONCURRENCY = {"steps": 32, "tools": os.cpu_count() or 1}


CONNECTIONS = 32
"""To Redis, that a worker with threads makes at its start: more than it uses at once, mostly."""


def make_app(
    settings: Settings,
    agents: Agents,
    *,
    pool: str = "prefork",
    observer: Observer | None = None,
    store: RunStore | None = None,
) -> Celery:
    """A Celery app with the tasks of the loop and recovery in every worker that it starts."""
    app = Celery("celeriac")
    app.conf.update(worker_config(settings))
    if settings.celery_config:
        _add_config(app, settings)
    store = store or RunStore(settings)
    # Only a pool of processes can end one of them without ending the others' work.
    kill = partial(end_process, observer) if pool == "prefork" else None
    loop = Loop(store, agents, settings=settings, kill=kill, observer=observer)
    add_tasks(app, loop)
    longest = max((tool.timeout for each in agents.values() for tool in each.toolbox), default=0)
    # The child ends its own tools in time; the parent's limit is for one that can't even do that.
    app.tasks[CALL_TOOL].time_limit = longest + HARD_LIMIT_MARGIN
    replace_revoke(store)
    answer_about(store, agents)
    app.steps["worker"].add(recovery_step(app, loop, settings))
    app.steps["consumer"].add(LeaveQueue)
    return app


def recovery_step(app: Celery, loop: Loop, settings: Settings) -> type[bootsteps.StartStopStep]:
    """The part of a worker that recovers runs and announces agents, from its start to its end."""

    class Recovery(bootsteps.StartStopStep):
        requires = ("celery.worker.components:Pool",)

        def __init__(self, parent: Any, **_: Any) -> None:  # noqa: ARG002
            self.recoverer = Recoverer(app, loop, every=settings.recover_every)
            self.drain = Drain(app, loop, seconds=settings.drain)

        def start(self, parent: Any) -> None:
            self.recoverer.start()
            if isinstance(parent.pool, StepPool):  # a pool's children make their own
                with contextlib.suppress(RedisUnavailable):
                    loop.store.connect_ahead(min(parent.pool.limit, CONNECTIONS))
            if isinstance(loop.observer, Witnesses):
                loop.hear_ends()

        def stop(self, parent: Any) -> None:  # noqa: ARG002
            self.recoverer.stop()

    return Recovery


def run_worker(
    queue: str,
    *,
    concurrency: int | None = None,
    pool: str | None = None,
    loglevel: str = "INFO",
) -> int:
    """Serve one queue until told to stop; answers the exit code.

    Raises `CeleriacError` before anything is started where settings, agents or Redis aren't right.
    """
    settings = Settings.from_env()
    agents = load_agents(settings.agents)
    pool = pool or DEFAULT_POOL[queue]
    with contextlib.ExitStack() as parts:
        store = RunStore(settings)
        parts.callback(store.close)
        observer = make_observer(settings, store, agents, parts)
        app = make_app(settings, agents, pool=pool, observer=observer, store=store)
        store.check()
        check_start(app, store, settings, queue=queue, pool=pool)
        let_scripts_send(app, store)
        store.envelopes()  # a child that is forked later has it then
        store.close()  # no connection is for a child to inherit
        if in_json := settings.log_format == "json":
            log_as_json()
        # What is loaded by now stays: a collection that goes through all of it stops the process
        # for a tenth of a second, and makes a child's copy of what it shares with its parent.
        gc.collect()
        gc.freeze()
        return _serve(
            app, queue, concurrency=concurrency, pool=pool, loglevel=loglevel, quiet=in_json
        )


def _serve(
    app: Celery,
    queue: str,
    *,
    concurrency: int | None,
    pool: str,
    loglevel: str,
    quiet: bool,
) -> int:
    # One line for each request, with its URL, is the SDK's habit and not ours.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    logging.getLogger("celery.worker.request").addFilter(OneLineOfLoss())
    # At DEBUG Celery's pools log whatever they are handed: a start's goal, as its sender wrote it.
    logging.getLogger("celery.pool").setLevel(logging.INFO)
    if loglevel.upper() != "DEBUG":
        # "succeeded": what our own line of a step or a call says too, and of each.
        logging.getLogger("celery.app.trace").setLevel(logging.WARNING)
    worker = app.Worker(
        hostname=f"{queue}-{os.getpid()}@{socket.gethostname()}",
        pool=POOLS[pool],
        concurrency=concurrency or CONCURRENCY[queue],
        queues=[QUEUES[queue]],
        loglevel=loglevel,
        quiet=quiet,  # the banner is no JSON
        # Neither is needed, and both cost messages for each worker that is added.
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    code: int = worker.exitcode or 0
    return code


def _add_config(app: Celery, settings: Settings) -> None:
    name = settings.celery_config
    try:
        module = importlib.import_module(name)
    except Exception as error:
        # Whatever a user's module raises at import is theirs to read, in one line.
        raise SettingsError(
            f"CELERIAC_CELERY_CONFIG: can't import {name!r}: {type(error).__name__}: {error}"
        ) from error
    given = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    app.conf.update(merge_config(settings, given))


def end_process(observer: Observer | None = None) -> None:
    """End a pool child at once, with the tool that won't let go; its parent starts another."""
    if isinstance(observer, Witnesses):
        observer.flush()
    os._exit(70)
