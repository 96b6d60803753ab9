"""The obvious design under fire: the same tasks, with a ledger outside of Redis of what they did.

`OBVIOUS_CAREFUL=1` turns on what Celery's documents offer against loss: late acknowledgements, also
for a lost worker, and a visibility timeout of seconds instead of an hour.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import benchmarks.obvious.app as design
from benchmarks.load import Message, read_load

app = design.app

if os.environ.get("OBVIOUS_CAREFUL"):
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        broker_transport_options={"visibility_timeout": 10},
    )

ask, end = design.ask_model, design.finish


def note(what: str, which: str | int) -> None:
    """One line of the ledger, in one write, so that a kill leaves no half of it."""
    with Path(os.environ["OBVIOUS_LEDGER"]).open("ab", buffering=0) as ledger:
        line = {"what": what, "which": which, "pid": os.getpid(), "at": time.time()}
        ledger.write(json.dumps(line).encode() + b"\n")


def ask_model(history: list[Message]) -> Message:
    load, turn = read_load(history)
    note("ask", f"{load.first}.{turn}")
    chance = random.Random(f"{load.first}.{turn}")
    slow = chance.random() < 0.1
    time.sleep(chance.uniform(0.8, 2.0) if slow else chance.uniform(0.02, 0.3))
    return ask(history)


def run_tool(n: int, seconds: float = 0.0, chars: int = 0) -> str:  # noqa: ARG001
    note("begin", n)
    chance = random.Random(n)
    time.sleep(chance.uniform(0.6, 1.5) if chance.random() < 0.06 else chance.uniform(0.01, 0.15))
    return str(n)


def finish(run_id: str, text: str) -> None:
    note("end", run_id)
    end(run_id, text)


# The tasks look these up when they run.
design.ask_model, design.run_tool, design.finish = ask_model, run_tool, finish
