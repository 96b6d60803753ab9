"""A bare Celery hop: a task that enqueues itself, with stock settings and nothing else."""

from __future__ import annotations

import os

import redis
from celery import Celery

URL = os.environ.get("HOP_REDIS_URL", "redis://127.0.0.1:6379/0")

app = Celery("hop", broker=URL)

store = redis.Redis.from_url(URL, decode_responses=True)


@app.task
def hop(run_id: str, left: int) -> None:
    if left:
        hop.delay(run_id, left - 1)
    else:
        store.set(f"hop:{run_id}", "done")
