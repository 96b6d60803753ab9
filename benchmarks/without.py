"""A worker that leaves something out, to tell what that costs.

`python -m benchmarks.without trace steps` is a steps worker that keeps no trace.

The scripts are changed on their way to Redis; whatever is computed for them in Python still is.
"""

from __future__ import annotations

import re
import sys

import benchmarks.agents  # noqa: F401 - imported before the worker, as everybody's agents are
from runner import scripts
from worker.app import run_worker

TRACE_KEY = re.compile(r"^-- KEYS\[(\d+)\] trace LIST", re.MULTILINE)


def leave_out(what: str, name: str, text: str) -> str:
    """A script's text without its `events` or its `trace`."""
    if name == "prelude":
        text = "local function drop() end\n" + text
    if what == "events":
        return text.replace("redis.call('XADD', ", "drop(")
    number = TRACE_KEY.search(text)
    return text.replace(f"redis.call('RPUSH', KEYS[{number[1]}], ", "drop(") if number else text


def main(what: str, queue: str) -> int:
    read = scripts._read
    scripts._read = lambda name: leave_out(what, name, read(name))  # type: ignore[assignment]
    return run_worker(queue)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
