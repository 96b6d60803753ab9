"""LangGraph as its quickstart has an agent: a node asks the model, a node runs the tools.

`python -m benchmarks.peers.langgraph_agent URL`; the checkpoints go to Postgres or to SQLite.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import uuid
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from benchmarks.load import Load, plan_calls, read_load
from benchmarks.peers.answering import answer_counts

ROLES = {"human": "user", "ai": "assistant", "tool": "tool"}


def ask_model(state: Any) -> dict[str, Any]:
    plain = [{"role": ROLES[each.type], "content": each.content} for each in state["messages"]]
    load, turn = read_load(plain)
    calls = [
        {"name": name, "args": arguments, "id": f"c{index}", "type": "tool_call"}
        for index, (name, arguments) in enumerate(plan_calls(load, turn))
    ]
    return {"messages": [AIMessage("" if calls else "done", tool_calls=calls)]}


def run_tools(state: Any) -> dict[str, Any]:
    calls = state["messages"][-1].tool_calls
    return {
        "messages": [ToolMessage(str(call["args"]["n"]), tool_call_id=call["id"]) for call in calls]
    }


def goes_on(state: Any) -> str:
    return "run_tools" if state["messages"][-1].tool_calls else END


def make_checkpointer(url: str) -> Any:
    if url.startswith("sqlite:"):
        path = url.removeprefix("sqlite:")
        return SqliteSaver(sqlite3.connect(path, check_same_thread=False))
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    return PostgresSaver(ConnectionPool(url, max_size=20, kwargs=options, open=True))


def main(url: str) -> None:
    checkpointer = make_checkpointer(url)
    checkpointer.setup()
    builder = StateGraph(MessagesState)
    builder.add_node("ask_model", ask_model)
    builder.add_node("run_tools", run_tools)
    builder.add_edge(START, "ask_model")
    builder.add_conditional_edges("ask_model", goes_on, ["run_tools", END])
    builder.add_edge("run_tools", "ask_model")
    graph = builder.compile(checkpointer=checkpointer)
    goal = Load().goal

    def run() -> None:
        config = {"configurable": {"thread_id": str(uuid.uuid4())}, "recursion_limit": 100}
        state = graph.invoke({"messages": [HumanMessage(goal)]}, config)
        assert state["messages"][-1].content == "done"
        assert len(state["messages"]) == 1 + 10 * 5 + 1, json.dumps(len(state["messages"]))

    answer_counts(run)


if __name__ == "__main__":
    main(sys.argv[1])
