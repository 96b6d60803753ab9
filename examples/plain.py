"""A Celery app that imports nothing of Celeriac: it asks an agent, is told the end, takes it back.

    celery -A examples.plain worker -Q desk -P solo
    python -m examples.plain ask "Can order A001 be refunded?"
    python -m examples.plain withdraw RUN

It needs the broker alone, and for the state and the answer a result backend, which the workers of
the agents know as CELERIAC_RESULT_BACKEND.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult

REDIS = os.environ.get("CELERIAC_REDIS_URL", "redis://127.0.0.1:6379/0")

app = Celery("desk", broker=REDIS, backend=REDIS)


def ask(question: str) -> AsyncResult[dict[str, Any]]:
    """Start a run. The id of the task is the id of the run."""
    run_id = str(uuid.uuid4())
    app.send_task(
        "celeriac.start",
        kwargs={
            "goal": question,
            "agent": "support",
            "on_finish": {"task": "desk.file_answer", "queue": "desk"},
        },
        task_id=run_id,
        queue="celeriac.steps",
    )
    return AsyncResult(run_id, app=app)


def withdraw(run_id: str) -> None:
    """Cancel a run, as any task is revoked."""
    app.control.revoke(run_id)


@app.task(name="desk.file_answer", ignore_result=True)
def file_answer(result: dict[str, Any]) -> None:
    """Called once a run has ended, however it ended; perhaps more than once."""
    folder = Path(os.environ.get("DESK_FOLDER", "answers"))
    folder.mkdir(parents=True, exist_ok=True)
    text = result["answer"] if result["ok"] else result["stop_reason"]
    (folder / f"{result['run_id']}.txt").write_text(str(text), encoding="utf-8")


def main(verb: str, argument: str) -> None:
    if verb == "withdraw":
        withdraw(argument)
        return
    asked = ask(argument)
    sys.stdout.write(f"{asked.id}\n")
    sys.stdout.flush()
    # An end other than COMPLETED raises here: RunFailed, or TaskRevokedError for a cancel.
    result = asked.get(timeout=60)
    sys.stdout.write(f"{result['stop_reason']}: {result['answer']}\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
