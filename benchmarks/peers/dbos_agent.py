"""DBOS as its documents have an agent: a workflow whose model calls and tools are steps.

`python -m benchmarks.peers.dbos_agent URL inside|queue|eager`: the tools run as steps of the
workflow, or as workflows of their own through a queue; queue and results are polled once a second,
as is the default, or fifty times.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from dbos import DBOS

from benchmarks.load import Load, Message, answer
from benchmarks.peers.answering import answer_counts


@DBOS.step()
def ask_model(history: list[Message]) -> Message:
    return answer(history)


def give_back(call: dict[str, Any]) -> Message:
    content = str(json.loads(call["function"]["arguments"])["n"])
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


@DBOS.step()
def run_tool(call: dict[str, Any]) -> Message:
    return give_back(call)


@DBOS.workflow()
def run_queued_tool(call: dict[str, Any]) -> Message:
    result: Message = run_tool(call)
    return result


@DBOS.workflow()
def run_agent(goal: str, polling: float | None) -> str:
    history: list[Message] = [{"role": "user", "content": goal}]
    while True:
        reply = ask_model(history)
        history.append(reply)
        calls = reply.get("tool_calls")
        if not calls:
            return str(reply["content"])
        if polling is None:
            history += [run_tool(call) for call in calls]
        else:
            handles = [DBOS.enqueue_workflow("tools", run_queued_tool, call) for call in calls]
            history += [each.get_result(polling_interval_sec=polling) for each in handles]


def main(url: str, how: str) -> None:
    # A schema each, so that two of these don't serve the same queue.
    schema = f"dbos_{how}"
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "dbos_system_schema": schema,
            "log_level": "ERROR",
        }
    )
    DBOS.launch()
    polling = {"inside": None, "queue": 1.0, "eager": 0.02}[how]
    DBOS.register_queue("tools", polling_interval_sec=polling or 1.0)
    goal = Load().goal

    def run() -> None:
        assert DBOS.start_workflow(run_agent, goal, polling).get_result() == "done"

    answer_counts(run)
    DBOS.destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
