"""The routes over real HTTP: what they take, what they answer, and what they refuse."""

from __future__ import annotations

import httpx

from tasks import Client

GOAL = {"goal": "Can order A001 be refunded?", "agent": "helper"}


def test_a_goal_is_accepted_with_the_id_of_its_run(http: httpx.Client, client: Client) -> None:
    answer = http.post("/runs", json=GOAL)

    assert answer.status_code == 202
    run_id = answer.json()["id"]
    assert client.get(run_id).status() == "queued"
    assert answer.headers["Location"].endswith(f"/runs/{run_id}")
    assert http.get(answer.headers["Location"]).json()["goal"] == GOAL["goal"]


def test_the_events_of_an_ended_run_come_once_and_the_stream_ends(
    http: httpx.Client, client: Client
) -> None:
    run = client.submit("go", agent="helper")
    run.cancel()
    answer = http.get(f"/runs/{run.id}/events")
    ids = [line for line in answer.text.splitlines() if line.startswith("id: ")]
    assert ids == [f"id: {event.id}" for event in run.events()]
    assert http.get("/openapi.json").json()["paths"]["/runs"]
    assert http.get("/").headers["content-type"].startswith("text/html")
