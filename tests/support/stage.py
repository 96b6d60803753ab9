"""One fleet for many tests: real workers stay up, and each test's goal has a script of its own."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support.fleet import Fleet, fleet, url_of, valkey
from support.model_server import ModelServer, Reply, final
from tasks import Client, Run

Script = Callable[[dict[str, Any]], Reply]

_numbers = itertools.count()


class Stage:
    """Submits goals with their scripts, and knows which requests belong to which goal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scripts: dict[str, Script] = {}
        self._bodies: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.model: ModelServer
        self.fleet: Fleet
        self.client: Client

    def submit(
        self, replies: Sequence[Reply] | Script, *, agent: str = "helper", **options: Any
    ) -> Run:
        """A run whose model answers with `replies` in order, and "done" after the last."""
        goal = f"goal {next(_numbers)}"
        self.script(goal, replies)
        run = self.client.submit(goal, agent=agent, **options)
        with self._lock:
            self._bodies[run.id] = self._bodies[goal]
        return run

    def script(self, goal: str, replies: Sequence[Reply] | Script) -> None:
        """What the model answers to this goal, whoever submits it."""
        with self._lock:
            self._scripts[goal] = replies if callable(replies) else in_order(replies)

    def requests(self, run: Run) -> list[dict[str, Any]]:
        """The bodies that the model server was sent for this run, in order."""
        with self._lock:
            return list(self._bodies[run.id])

    def results(self, run: Run) -> list[str]:
        """The contents of the tool messages in the run's last request."""
        messages = self.requests(run)[-1]["messages"]
        return [each["content"] for each in messages if each["role"] == "tool"]

    def reply(self, body: dict[str, Any]) -> Reply:
        goal = next(each["content"] for each in body["messages"] if each["role"] == "user")
        with self._lock:
            self._bodies[goal].append(body)
            script = self._scripts.get(goal, in_order([]))
            return script(body)


OpenStage = Callable[..., Stage]


def in_order(replies: Sequence[Reply]) -> Script:
    """One reply after the other, whatever is asked; "done" after the last."""
    left = iter(replies)
    return lambda _: next(left, final("done"))


def by_turn(replies: Sequence[Reply]) -> Script:
    """The reply that belongs to the history that is sent: asked again, it answers the same."""

    def reply(body: dict[str, Any]) -> Reply:
        turn = sum(each["role"] == "assistant" for each in body["messages"])
        return replies[turn] if turn < len(replies) else final("done")

    return reply


@contextlib.contextmanager
def open_stage(folder: Path, **environ: str) -> Iterator[Stage]:
    """A stage with a steps and a tools worker; fails if a request or a record was ever broken."""
    stage = Stage()
    data = folder / "redis"
    data.mkdir(parents=True)
    with (
        valkey(data) as server,
        ModelServer(stage.reply) as stage.model,
        fleet(url_of(server), folder, model=stage.model, **environ) as stage.fleet,
        stage.fleet.client() as stage.client,
    ):
        stage.fleet.start("steps", name="steps", concurrency=8)
        stage.fleet.start("tools", name="tools", concurrency=4)
        stage.fleet.wait_for(stage.client.store.read_agents)
        yield stage
        assert stage.model.violations == []
