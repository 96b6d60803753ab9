"""The obvious design: a step asks the model, a chord runs its tools, its callback goes on.

This is how Celery's own documents put such a thing together: stock settings, the history as one
value in Redis, a task that enqueues the next one by `delay`. Nothing in it is made slow or weak.
Whoever starts a run saves its goal as the first message, and calls `step.delay(run_id)`.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery, chord

from benchmarks.load import Message, answer, read_load

URL = os.environ.get("OBVIOUS_REDIS_URL", "redis://127.0.0.1:6379/0")

app = Celery("obvious", broker=URL, backend=URL)

store = redis.Redis.from_url(URL, decode_responses=True)


@app.task
def step(run_id: str) -> None:
    history = load_history(run_id)
    reply = ask_model(history)
    history.append(reply)
    save_history(run_id, history)
    if "tool_calls" in reply:
        chord([call_tool.s(call) for call in reply["tool_calls"]])(gather.s(run_id))
    else:
        finish(run_id, reply["content"])


@app.task
def call_tool(call: dict[str, Any]) -> Message:
    content = run_tool(**json.loads(call["function"]["arguments"]))
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


@app.task
def gather(results: list[Message], run_id: str) -> None:
    save_history(run_id, load_history(run_id) + results)
    step.delay(run_id)


def load_history(run_id: str) -> list[Message]:
    history: list[Message] = json.loads(store.get(f"obvious:{run_id}") or "[]")
    return history


def save_history(run_id: str, history: list[Message]) -> None:
    store.set(f"obvious:{run_id}", json.dumps(history))


def finish(run_id: str, text: str) -> None:
    store.set(f"obvious:{run_id}:answer", text)


def ask_model(history: list[Message]) -> Message:
    load, _ = read_load(history)
    if load.asking:
        time.sleep(load.asking)
    return answer(history)


def run_tool(n: int, seconds: float = 0.0, chars: int = 0) -> str:
    if seconds:
        time.sleep(seconds)
    return f"{n}{'x' * chars}"
