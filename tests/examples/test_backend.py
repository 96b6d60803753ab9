"""The web backend example end to end: real workers, real HTTP, and a customer who reads along."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.backend import make_app
from support.fleet import fleet, url_of, valkey
from support.http import serving
from support.model_server import ModelServer, Reply, calls, final


def test_a_customer_asks_reads_along_and_changes_their_mind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redis").mkdir()
    never = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        if "Never" in json.dumps(body["messages"]):
            return final("too late") | {"hold": never}
        asked = any(each["role"] == "tool" for each in body["messages"])
        return final("Yes.") if asked else calls(("get_order", {"order_id": "A001"}))

    monkeypatch.setenv("SHOP_SESSIONS", json.dumps({"of-u42": "u42", "of-u7": "u7"}))
    with (
        valkey(tmp_path / "redis") as server,
        ModelServer(answer) as model,
        fleet(url_of(server), tmp_path, model=model, agents="examples.orders") as made,
        made.client() as client,
        serving(make_app(client)) as url,
        httpx.Client(base_url=url, cookies={"session": "of-u42"}, timeout=20) as browser,
    ):
        made.start("steps")
        made.start("tools")

        assert "EventSource" in browser.get("/").text
        run = ask(browser, "Can it be refunded?")
        types = [event["type"] for event in follow(browser, run)]
        assert types[0] == "run.created"
        assert {"step.started", "call.finished", "model.answered"} <= set(types)
        assert types[-1] == "run.finished"
        told = browser.get(f"/agents/runs/{run}").json()
        assert (told["result"]["answer"], told["info"]["metadata"]) == ("Yes.", {"order": "A001"})

        second = ask(browser, "Never mind?")
        for event in follow(browser, second):
            if event["type"] == "step.started":
                done = browser.post(f"/agents/runs/{second}/cancel", json={"reason": "nothing"})
                assert done.is_success
        assert client.get(second).result(timeout=5).stop_reason == "CANCELLED"
        never.set()

        other = httpx.get(f"{url}/agents/runs/{run}", cookies={"session": "of-u7"})
        assert other.status_code == 404
        assert httpx.get(f"{url}/agents/runs/{run}").status_code == 401


def ask(browser: httpx.Client, question: str) -> str:
    made = browser.post("/orders/A001/question", json={"question": question})
    assert made.status_code == 202, made.text
    return str(made.json()["run"])


def follow(browser: httpx.Client, run: str) -> Iterator[dict[str, Any]]:
    with browser.stream("GET", f"/agents/runs/{run}/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
