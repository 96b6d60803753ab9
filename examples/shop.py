"""A shop's own Celery app, with nothing of Celeriac in it: it gets a ticket when an agent gives up.

client.submit(goal, agent="support", on_finish="shop.open_ticket")
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery

app = Celery("shop", broker=os.environ.get("CELERIAC_REDIS_URL", "redis://127.0.0.1:6379/0"))
app.conf.task_ignore_result = True


@app.task(name="shop.open_ticket", bind=True)
def open_ticket(self: Any, result: dict[str, Any]) -> None:
    """Hand a run that ended without an answer to a human.

    Called at least once, each time under the same task id: a ticket is named after it, so that a
    repeat opens no second one.
    """
    if result["ok"]:
        return
    tickets = Path(os.environ.get("SHOP_TICKETS", "tickets"))
    tickets.mkdir(parents=True, exist_ok=True)
    ticket = {
        "run": result["run_id"],
        "why": result["stop_reason"],
        "limit": result["limit"],
        "evidence": [each["source"] for each in result["evidence"]],
    }
    (tickets / f"{self.request.id}.json").write_text(json.dumps(ticket, indent=2))
