"""The order example end to end: real workers, and the shop's own Celery app beside them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from runner import StopReason
from support.fleet import ROOT, fleet, url_of, valkey
from support.model_server import ModelServer, calls, final


def test_the_order_support_conversation(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    script = [
        calls(("get_order", {"order_id": "A001"}), ("get_refund_policy", {})),
        calls(
            ("get_weather", {"city": "Oslo"}),
            ("get_weather", {"city": "Atlantis"}),
            ("get_weather", {"city": "Paris"}),
        ),
        final("Yes, A001 can be refunded; it is cold in Oslo."),
    ]
    with (
        valkey(tmp_path / "redis") as server,
        ModelServer(script) as model,
        fleet(url_of(server), tmp_path, model=model, agents="examples.orders") as made,
        made.client() as client,
    ):
        made.start("steps")
        made.start("tools")
        run = client.submit("Can order A001 be refunded, and how is the weather?", agent="support")

        result = run.result(timeout=30)

        assert result.answer == "Yes, A001 can be refunded; it is cold in Oslo."
        order, policy, oslo, atlantis, paris = [
            json.loads(each["content"]) for each in run.messages() if each["role"] == "tool"
        ]
        assert order["order_id"] == "A001"
        assert any(isinstance(value, int) for value in policy.values())
        assert oslo["city"] == "Oslo"
        assert atlantis["error"]["type"] == "NOT_FOUND"
        assert paris["city"] == "Paris"
        assert {each.call_id for each in result.evidence} >= {"0.0", "0.1", "1.0", "1.2"}
        assert model.violations == []


def test_an_agent_that_stops_at_its_cap_opens_a_ticket_for_a_human(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    endless = [calls(*[("get_weather", {"city": "Oslo"})] * (n + 1)) for n in range(20)]
    with (
        valkey(tmp_path / "redis") as server,
        ModelServer(endless) as model,
        fleet(url_of(server), tmp_path, model=model, agents="examples.orders") as made,
        made.client() as client,
    ):
        made.start("steps")
        made.start("tools")
        environ = made.environ | {"SHOP_TICKETS": str(tmp_path / "tickets")}
        environ.pop("CELERIAC_AGENTS")
        with (tmp_path / "shop.log").open("wb") as log:
            shop = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "examples.shop", "worker", "-P", "solo"],
                cwd=ROOT,
                env=environ,
                stdout=log,
                stderr=log,
            )
        try:
            run = client.submit("Order?", agent="support", on_finish="shop.open_ticket")
            assert run.result(timeout=30).stop_reason is StopReason.MAX_STEPS
            ticket = tmp_path / "tickets" / f"{run.id}.finished.json"
            made.wait_for(lambda: ticket.exists() and ticket.read_text())
            assert json.loads(ticket.read_text())["limit"] == "max_steps"
        finally:
            shop.send_signal(signal.SIGTERM)
            shop.wait(20)
