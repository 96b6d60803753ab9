"""The offline model decides from what it is sent, and speaks the protocol of the real ones."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from examples import orders, workspace
from runner import Agent, Context, Final, ModelRequest, ToolCalls
from runner.model import OpenAIModel
from runner.tools import execute
from worker.offline_model import OfflineModel, decide, find_cities, find_orders, summarize

Message = dict[str, Any]

WORKSPACE_TOOLS = workspace.agent.toolbox.definitions()
SUPPORT_TOOLS = orders.agent.toolbox.definitions()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def list_calls(message: Message) -> list[tuple[str, dict[str, Any]]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]


def run_calls(agent: Agent, message: Message) -> list[Message]:
    """What the runner would send back: the real tools' results, in the order of the calls."""
    results = []
    for call in message["tool_calls"]:
        tool = agent.toolbox.get(call["function"]["name"])
        assert tool is not None
        result = execute(tool, Context(), call["function"]["arguments"]).result
        results.append({"role": "tool", "tool_call_id": call["id"], "content": result.content})
    return results


def converse(agent: Agent, goal: str, **options: Any) -> tuple[list[list[Any]], str]:
    """The calls of each turn, and the answer at the end."""
    messages, turns = [user(goal)], list[list[Any]]()
    while "tool_calls" in (message := decide(messages, agent.toolbox.definitions(), **options)):
        turns.append(list_calls(message))
        messages += [message, *run_calls(agent, message)]
        assert len(turns) < 30, "it never comes to an end"
    return turns, message["content"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project to look at, as the workspace."""
    (tmp_path / "README.md").write_text("# Celery soup\n\nA soup of\nroots.\n\n## More\n", "utf-8")
    (tmp_path / "Makefile").write_text("run:\n\techo run\n", "utf-8")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "soup"\n', "utf-8")
    (tmp_path / "recipe.txt").write_text("Peel the root.\n", "utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text("# Guide\n\nStir.\n", "utf-8")
    monkeypatch.setenv("WORKSPACE", str(tmp_path))
    return tmp_path


# --- the workspace -----------------------------------------------------------------------------


def test_the_goal_of_the_demo_lists_then_reads_several_files_at_once_then_answers(
    folder: Path,
) -> None:
    turns, answer = converse(
        workspace.agent, "What is in this folder, and what does its README say?"
    )

    assert turns == [
        [("list_files", {"path": "."})],
        [
            ("read_file", {"path": "README.md"}),
            ("read_file", {"path": "Makefile"}),
            ("read_file", {"path": "pyproject.toml"}),
        ],
    ]
    assert "The folder holds 5 files and 1 folder: docs/, " in answer
    assert "README.md says: “Celery soup” “A soup of roots.”" in answer
    assert "I read README.md, Makefile and pyproject.toml." in answer


def test_the_answer_follows_the_files_and_is_no_transcript(folder: Path) -> None:
    (folder / "README.md").write_text("# Something else\n\nEntirely.\n", "utf-8")

    _, answer = converse(workspace.agent, "What does the README say?")

    assert "“Something else” “Entirely.”" in answer


@pytest.mark.parametrize(
    ("goal", "read"),
    [
        ("What does the README say?", ["README.md"]),
        ("What does the recipe want me to do?", ["recipe.txt"]),
        ("Compare recipe.txt with the makefile.", ["Makefile", "recipe.txt"]),
        ("Tell me about docs/guide.md", ["docs/guide.md"]),
        ("Show ./recipe.txt", ["recipe.txt"]),
        ("Summarize this.", ["README.md", "Makefile", "pyproject.toml"]),
        ("Read https://example.org/page.md and recipe.txt", ["recipe.txt"]),
    ],
)
def test_it_reads_what_the_goal_is_about(folder: Path, goal: str, read: list[str]) -> None:
    turns, answer = converse(workspace.agent, goal)

    assert [arguments["path"] for name, arguments in turns[1] if name == "read_file"] == read
    assert all(path in answer for path in read)


def test_subfolders_are_listed_beside_the_reads_where_the_goal_asks_for_them(folder: Path) -> None:
    turns, answer = converse(workspace.agent, "List the subfolders and read the recipe and guide.")

    assert turns[1] == [("read_file", {"path": "recipe.txt"}), ("list_files", {"path": "docs/"})]
    assert turns[2] == [("read_file", {"path": "docs/guide.md"})]
    assert "docs/ holds 1 file and 0 folders: docs/guide.md." in answer


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ("Read missing.txt", "I could not read missing.txt: there is no missing.txt"),
        ("Read ../../etc/passwd", "I could not read ../../etc/passwd: '..' can't be used"),
        ("What is in image.png?", "I could not read image.png: image.png isn't UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_said_to_be_so(folder: Path, goal: str, said: str) -> None:
    _, answer = converse(workspace.agent, goal)

    assert said in answer
    assert "I read no file." in answer


def test_a_folder_that_cannot_be_listed_is_said_to_be_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKSPACE", str(folder / "gone"))

    _, answer = converse(workspace.agent, "What is in this folder?")

    assert "I could not list .: the workspace can't be opened" in answer
    assert "(NOT_FOUND)" in answer


def test_an_empty_folder_is_said_to_be_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKSPACE", str(tmp_path))

    turns, answer = converse(workspace.agent, "What is in this folder?")

    assert len(turns) == 1
    assert "The folder holds 0 files and 0 folders." in answer


def test_a_cut_listing_is_said_not_to_be_whole(folder: Path) -> None:
    for number in range(workspace.MAX_ENTRIES):
        (folder / f"{number:04}").touch()

    _, answer = converse(workspace.agent, "What does the recipe say?")

    assert "The listing is not whole: ... [cut: 500 of" in answer


def test_a_result_in_an_unknown_form_is_no_reason_to_fail(folder: Path) -> None:
    first = decide([user("What is here?")], WORKSPACE_TOOLS)
    result = {"role": "tool", "tool_call_id": "call_0", "content": '{"entries": [{"path"... [cut'}

    answer = decide([user("What is here?"), first, result], WORKSPACE_TOOLS)["content"]

    assert "I could not list .: the result is in a form that this model can't read" in answer


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("# T\n\none\ntwo\n\nthree", ("T", "one two")),
        ("T\n===\n\none", ("T", "one")),
        ("<p align=center>\n[![CI](x)](y)\n\n# T\n![logo](z)\n\none", ("T", "one")),
        ("# T\n```\n# no title\n```\none", ("T", "one")),
        ("only text", ("", "only text")),
        ("# T\n## Sub\n", ("T", "")),
        ("", ("", "")),
    ],
)
def test_a_title_and_a_first_paragraph_are_found(markdown: str, expected: tuple[str, str]) -> None:
    assert summarize(markdown) == expected


# --- the shop ----------------------------------------------------------------------------------


def test_orders_policy_and_cities_are_looked_up_in_one_turn() -> None:
    turns, answer = converse(
        orders.agent,
        "Can orders A001 and a002 be refunded? And what's the weather in Paris and New York?",
    )

    assert turns == [
        [
            ("get_order", {"order_id": "A001"}),
            ("get_order", {"order_id": "A002"}),
            ("get_refund_policy", {}),
            ("get_weather", {"city": "Paris"}),
            ("get_weather", {"city": "New York"}),
        ]
    ]
    assert "Order A001 (desk lamp) can be refunded: it was delivered 5 days ago" in answer
    assert "Order A002 (office chair) can't be refunded: it was delivered 45 days ago" in answer
    assert "The weather in Paris: light rain, 18.5 °C." in answer
    assert "The weather in New York: windy, 16.0 °C." in answer


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ("Can A003 be refunded?", "can't be refunded: it is shipped, and only delivered orders"),
        ("Can A004 be returned?", "can't be refunded: it is refunded"),
        ("Where is A003?", "Order A003 (notebook) is shipped."),
        ("What is your refund policy?", "within 30 days of its delivery"),
        ("Can Z999 be refunded?", "I could not look up order Z999: there is no order"),
        ("What's the weather in Atlantis?", "the weather in Atlantis: no weather for that city"),
        ("Hello", "I found nothing to look up."),
    ],
)
def test_the_answer_says_what_the_results_say(goal: str, said: str) -> None:
    assert said in converse(orders.agent, goal)[1]


def test_a_change_of_the_policy_changes_the_verdict() -> None:
    messages = [user("Can A001 be refunded?")]
    message = decide(messages, SUPPORT_TOOLS)
    order, policy = run_calls(orders.agent, message)
    policy["content"] = '{"days": 3, "statuses": ["delivered"], "text": ""}'

    answer = decide([*messages, message, order, policy], SUPPORT_TOOLS)["content"]

    assert "can't be refunded" in answer
    assert "the policy allows 3 days" in answer


def test_an_error_instead_of_the_policy_leaves_the_verdict_open() -> None:
    messages = [user("Can A001 be refunded?")]
    message = decide(messages, SUPPORT_TOOLS)
    order, policy = run_calls(orders.agent, message)
    policy["content"] = '{"ok": false, "error": {"type": "TIMEOUT", "message": "too slow"}}'

    answer = decide([*messages, message, order, policy], SUPPORT_TOOLS)["content"]

    assert "I could not look up the refund policy: too slow (TIMEOUT)." in answer
    assert "can be refunded" not in answer


def test_what_the_user_adds_later_is_looked_up_and_nothing_twice() -> None:
    messages = [user("Where is A001?")]
    message = decide(messages, SUPPORT_TOOLS)
    messages += [message, *run_calls(orders.agent, message)]
    messages += [decide(messages, SUPPORT_TOOLS), user("And A003?")]

    again = decide(messages, SUPPORT_TOOLS)

    assert list_calls(again) == [("get_order", {"order_id": "A003"})]
    assert again["tool_calls"][0]["id"] != message["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("goal", "cities"),
    [
        ("What is the weather in Paris?", ["Paris"]),
        ("Weather in Paris, Oslo and New York today?", ["Paris", "Oslo", "New York"]),
        ("Is it warm in Lagos or Århus?", ["Lagos", "Århus"]),
        ("Berlin weather?", ["Berlin"]),
        ("what's the weather like in paris?", ["paris"]),
        ("In Oslo, what is the forecast?", ["Oslo"]),
        ("Weather in Paris and order A001?", ["Paris"]),
        ("I live in Paris. Where is A001?", []),
        ("Is A001 in Paris?", []),
    ],
)
def test_cities_are_found_where_the_weather_is_asked_for(goal: str, cities: list[str]) -> None:
    assert find_cities(goal) == cities


def test_an_order_named_twice_is_looked_up_once() -> None:
    assert find_orders("A001, a001 and B1234; not AA01, A1 or 1001") == ["A001", "B1234"]


# --- any agent ---------------------------------------------------------------------------------


def test_tools_that_it_does_not_know_are_answered_with_the_cure() -> None:
    tool = {"type": "function", "function": {"name": "launch_rocket", "parameters": {}}}

    message = decide([user("Launch it")], [tool])

    assert "tool_calls" not in message
    assert "OPENAI_API_KEY" in message["content"]
    assert decide([user("Hello")], []) == message


def test_a_tool_that_is_not_offered_is_never_called() -> None:
    only_orders = [each for each in SUPPORT_TOOLS if each["function"]["name"] == "get_order"]

    message = decide([user("Refund A001? Weather in Paris?")], only_orders)

    assert list_calls(message) == [("get_order", {"order_id": "A001"})]


def test_tool_choice_none_is_answered_in_text(folder: Path) -> None:
    message = decide([user("What is here?")], WORKSPACE_TOOLS, tool_choice="none")

    assert message == {"role": "assistant", "content": "I read no file."}


def test_a_tool_choice_by_name_leaves_only_the_calls_of_that_tool() -> None:
    choice = {"type": "function", "function": {"name": "get_refund_policy"}}

    message = decide([user("Can A001 be refunded?")], SUPPORT_TOOLS, tool_choice=choice)

    assert list_calls(message) == [("get_refund_policy", {})]


def test_without_parallel_calls_it_makes_the_same_calls_one_by_one() -> None:
    goal = "Can A001 be refunded? Weather in Paris?"

    one_by_one, answer = converse(orders.agent, goal, parallel=False)

    (together,), same_answer = converse(orders.agent, goal)
    assert one_by_one == [[call] for call in together]
    assert answer == same_answer


def test_the_same_conversation_is_decided_the_same_way_twice() -> None:
    messages = [user("Can A001 be refunded?")]

    assert decide(messages, SUPPORT_TOOLS) == decide(messages, SUPPORT_TOOLS)


# --- over HTTP ---------------------------------------------------------------------------------


@pytest.fixture
def model() -> Iterator[OfflineModel]:
    with OfflineModel() as model:
        yield model


def post(model: OfflineModel, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(model.url).netloc, timeout=10)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


async def converse_by_sdk(url: str, agent: Agent, goal: str) -> list[Any]:
    """A whole conversation through the openai SDK, with the real tools: every choice there was."""
    messages: list[Any] = [user(goal)]
    choices = []
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        while True:
            response = await client.chat.completions.create(
                model="offline", messages=messages, tools=list[Any](agent.toolbox.definitions())
            )
            assert response.usage is not None
            assert response.usage.total_tokens > response.usage.completion_tokens > 0
            choices.append(response.choices[0])
            if not response.choices[0].message.tool_calls:
                return choices
            message = response.choices[0].message.model_dump(exclude_none=True)
            messages += [message, *await asyncio.to_thread(run_calls, agent, message)]


def test_a_conversation_by_the_sdk_comes_to_its_answer(model: OfflineModel, folder: Path) -> None:
    goal = "What is in this folder, and what does its README say?"

    choices = asyncio.run(converse_by_sdk(model.url, workspace.agent, goal))

    assert [choice.finish_reason for choice in choices] == ["tool_calls", "tool_calls", "stop"]
    assert "“Celery soup”" in choices[-1].message.content


def test_many_conversations_at_once_do_not_mix(model: OfflineModel) -> None:
    async def ask_all() -> list[list[Any]]:
        goals = [f"Where is A00{number % 5 + 1}?" for number in range(40)]
        return await asyncio.gather(
            *(converse_by_sdk(model.url, orders.agent, goal) for goal in goals)
        )

    answers = [choices[-1].message.content for choices in asyncio.run(ask_all())]

    for number, answer in enumerate(answers):
        assert answer.startswith(f"Order A00{number % 5 + 1} ")


def test_each_response_has_an_id_of_its_own(model: OfflineModel) -> None:
    body = json.dumps({"model": "offline", "messages": [user("Hello")]}).encode()

    (_, first), (_, second) = post(model, body), post(model, body)

    assert first["id"].startswith("chatcmpl-")
    assert first["id"] != second["id"]
    assert first["model"] == "offline"


CALL = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURN = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "{}"}

MALFORMED: dict[str, Any] = {
    "a list": [],
    "no model": {"messages": [user("a")]},
    "no messages": {"model": "m"},
    "empty messages": {"model": "m", "messages": []},
    "messages as text": {"model": "m", "messages": "a"},
    "a message as text": {"model": "m", "messages": ["a"]},
    "no role": {"model": "m", "messages": [{"content": "a"}]},
    "an unknown role": {"model": "m", "messages": [{"role": "king", "content": "a"}]},
    "content as a number": {"model": "m", "messages": [{"role": "user", "content": 1}]},
    "an orphan result": {"model": "m", "messages": [user("a"), RESULT]},
    "a missing result": {"model": "m", "messages": [user("a"), TURN]},
    "a late result": {"model": "m", "messages": [TURN, user("a"), RESULT]},
    "a second result": {"model": "m", "messages": [TURN, RESULT, RESULT]},
    "tools as a dict": {"model": "m", "messages": [user("a")], "tools": {"a": 1}},
    "a tool without a name": {"model": "m", "messages": [user("a")], "tools": [{"type": "x"}]},
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_is_refused_as_openai_would(model: OfflineModel, body: object) -> None:
    status, answer = post(model, json.dumps(body).encode())

    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_is_refused(model: OfflineModel, body: bytes) -> None:
    assert post(model, body) == (
        400,
        {
            "error": {
                "message": "the body is not JSON",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
        },
    )


def test_the_sdk_raises_its_own_error_for_a_refused_request(model: OfflineModel) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=model.url, api_key="none", max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[])

    with pytest.raises(openai.BadRequestError, match="messages must be a list"):
        asyncio.run(ask())


def test_another_path_is_not_found(model: OfflineModel) -> None:
    status, answer = post(model, b"{}", "/v1/embeddings")

    assert status == 404
    assert "POST /v1/chat/completions" in answer["error"]["message"]


def test_it_stays_quiet_when_a_client_goes_away(
    model: OfflineModel, capfd: pytest.CaptureFixture[str]
) -> None:
    address = urlsplit(model.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")

    status, _ = post(model, b"{}")

    assert status == 400
    assert capfd.readouterr() == ("", "")


def test_it_listens_on_loopback_alone_and_frees_its_port(model: OfflineModel) -> None:
    address = urlsplit(model.url)
    assert address.hostname == "127.0.0.1"
    assert address.path == "/v1"

    model.stop()
    model.stop()

    with pytest.raises(RuntimeError, match="isn't started"):
        _ = model.url
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port or 0))


def test_it_can_be_started_again_and_starting_twice_changes_nothing() -> None:
    model = OfflineModel()
    try:
        url = model.start().url
        assert model.start().url == url
        model.stop()
        model.start()
        assert post(model, b"{}")[0] == 400
    finally:
        model.stop()


@pytest.mark.parametrize("goal", ["What is in this folder?", ""])
def test_a_stream_holds_what_a_plain_answer_does(model: OfflineModel, goal: str) -> None:
    tool = {"type": "function", "function": {"name": "list_files", "parameters": {}}}
    request = ModelRequest(
        model="m", messages=({"role": "user", "content": goal},), tools=(tool,) if goal else ()
    )
    client = OpenAIModel(model.url, "offline")
    heard: list[str] = []

    plain = asyncio.run(client.respond(request))
    streamed = asyncio.run(client.stream(request, heard.append))

    assert isinstance(plain, ToolCalls if goal else Final)
    assert (plain.text, plain.usage) == (streamed.text, streamed.usage)
    assert "".join(heard) == (plain.text or "")
    if isinstance(plain, ToolCalls) and isinstance(streamed, ToolCalls):
        assert [(each.name, each.arguments) for each in plain.calls] == [
            (each.name, each.arguments) for each in streamed.calls
        ]
