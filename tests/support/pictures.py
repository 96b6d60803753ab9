"""Makes the pictures of the docs anew: `make pictures`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from runner import Settings
from runner.testing import calls
from support.browser import open_browser, visit
from support.fleet import url_of, valkey
from support.http import serving
from support.page_runs import Told, move_back, start_run, tell_events
from tasks import Client
from web import create_app

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

RUN = "0199a3c1-5c1e-7b2f-9d40-6f2a8e13c7b5"
GOAL = "Can orders A001 and A009 be refunded? If so, pay the money back."


def finish(tool: str, error: str | None = None) -> dict[str, object]:
    return {"tool": tool, "ok": error is None, "error": error}


TOLD: list[Told] = [
    (0, "run.created", None, None, {"agent": "support"}),
    (0.4, "step.started", 0, None, {"attempt": 1}),
    (2.3, "model.answered", 0, None, {"calls": 3, "refused": 0}),
    (2.3, "call.queued", 0, "0.0", {"tool": "get_order"}),
    (2.3, "call.queued", 0, "0.1", {"tool": "get_order"}),
    (2.3, "call.queued", 0, "0.2", {"tool": "count_shelf"}),
    (2.5, "call.started", 0, "0.0", {"attempt": 1}),
    (2.5, "call.started", 0, "0.1", {"attempt": 1}),
    (2.5, "call.waiting", 0, "0.2", {"reason": "LIMIT", "limit": "shelves"}),
    (3.3, "call.finished", 0, "0.0", finish("get_order")),
    (4.1, "call.finished", 0, "0.1", finish("get_order", "NOT_FOUND")),
    (4.5, "call.started", 0, "0.2", {"attempt": 1}),
    (5.8, "call.finished", 0, "0.2", finish("count_shelf")),
    (6, "step.started", 1, None, {"attempt": 1}),
    (7.4, "run.waiting", 1, None, {"reason": "RATE_LIMITED", "delay": 1.4, "status": 429}),
    (8.8, "step.started", 1, None, {"attempt": 2}),
    (10.4, "model.answered", 1, None, {"calls": 2, "refused": 0}),
    (10.4, "approval.requested", 1, "1.0", {"tool": "refund"}),
    (10.4, "call.queued", 1, "1.1", {"tool": "count_shelf"}),
    (10.6, "call.started", 1, "1.1", {"attempt": 1}),
    (11, "call.progress", 1, "1.1", {"done": 3, "total": 4, "note": "shelf 7"}),
]


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        valkey(Path(folder)) as server,
        Client(settings=Settings(redis_url=url_of(server))) as client,
        serving(create_app(client)) as url,
        open_browser() as browser,
    ):
        refund = ("refund", {"order_id": "A001", "cents": 4900})
        found = calls(("get_order", {"order_id": "A001"}), ("get_order", {"order_id": "A009"}))
        start_run(client.store, RUN, [found, calls(refund)], goal=GOAL, name="support")
        move_back(client.store, RUN, 18)
        tell_events(client.store, RUN, TOLD)
        with visit(browser, f"{url}/#/runs/{RUN}", viewport={"width": 1100, "height": 985}) as seen:
            seen.page.get_by_text("shelf 7").wait_for()
            seen.page.screenshot(path=IMAGES / "run-page.png")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    main()
