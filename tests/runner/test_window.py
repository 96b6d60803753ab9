"""Runs that are longer than their model's context: they go on, and each request is a valid one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from conftest import MakeStore
from runner import (
    Agent,
    AgentError,
    Evidence,
    Final,
    Limits,
    ModelError,
    ModelRequest,
    Result,
    StopReason,
    ToolResult,
    Usage,
    background,
    keys,
    tool,
)
from runner.invariants import check_run
from runner.loop import Finish, NextStep, cancel_run
from runner.model import OpenAIModel, write_request
from runner.models import ModelReply, RunErrorType
from runner.store import Outcome, RunStore
from runner.testing import calls
from runner.view import View
from runner.window import Window
from support import model_server
from support.loops import RUN, Loops, check_requests, drive, open_loops
from support.model_server import ModelServer, check_request

INSTRUCTIONS = "Look at every page. Be brief."
WINDOW = 8_000


@tool(idempotent=True, keep=("id",))
def read_page(number: int) -> Result[dict[str, Any]]:
    """Read one page of the book."""
    page = {"id": number, "text": f"Page {number}. " + "It was a dark and stormy night. " * 25}
    return Result(page, evidence=[Evidence(source=f"page {number}", text="stormy")])


@tool(idempotent=True)
def read_all() -> str:
    """Read the whole book."""
    return "It was a dark and stormy night. " * 2_000


class Reader:
    """Asks for one page after the other, in a context of `window` tokens that it counts itself.

    It refuses what a strict server refuses: a request that is too long or not valid.
    """

    name = "reader"

    def __init__(self, pages: int, *, window: int = WINDOW, per_token: float = 3.7) -> None:
        self.pages = pages
        self.window = window
        self.per_token = per_token
        self.requests: list[ModelRequest] = []
        self.sizes: list[int] = []
        self.refused = 0
        self.summaries = 0
        self.read = 0

    async def respond(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        body = write_request(request)
        assert check_request(body) == []
        text = json.dumps(body, ensure_ascii=False)
        self.sizes.append(int(len(text) / self.per_token))
        if self.sizes[-1] > self.window:
            self.refused += 1
            told = f"maximum context length is {self.window}, you sent {self.sizes[-1]}"
            raise ModelError("too long", type=RunErrorType.CONTEXT_OVERFLOW, raw=told)
        usage = _usage(self.sizes[-1])
        if "# What will be left out" in text:
            self.summaries += 1
            return Final(f"Summary {self.summaries}.", usage, raw="")
        if self.read == self.pages:
            return Final("All read.", usage, raw="")
        self.read += 1
        return replace(calls(("read_page", {"number": self.read})), usage=usage)

    @property
    def views(self) -> list[ModelRequest]:
        """The requests of steps, without those for a summary."""
        return [each for each in self.requests if each.tools]


def _usage(prompt: int) -> Usage:
    return Usage(requests=1, prompt_tokens=prompt, completion_tokens=5, total_tokens=prompt + 5)


@pytest.fixture
def loops(make_store: MakeStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(make_store())


def agent_of(model: Any, steps: int = 20, **options: Any) -> Agent:
    limits = Limits(max_steps=steps + 5, max_tool_calls=steps + 5)
    return Agent(
        name="a",
        instructions=INSTRUCTIONS,
        model=model,
        tools=[read_page, read_all],
        limits=limits,
        **options,
    )


COMPLETED = Finish(RUN, StopReason.COMPLETED)


def test_a_run_of_200_steps_in_a_window_of_8000_tokens_finishes(loops: Loops) -> None:
    model = Reader(200)
    loop = loops.start(agent_of(model, 200, context_tokens=WINDOW))

    assert drive(loop) == COMPLETED

    assert len(model.requests) == 201
    assert model.refused == 0
    assert max(model.sizes) <= WINDOW
    for request in model.requests:
        assert request.messages[0] == {"role": "system", "content": INSTRUCTIONS}
        assert request.messages[1] == {"role": "user", "content": "go"}
    for before, request in zip(model.requests[8:], model.requests[9:], strict=False):
        # What came last is there as it was.
        assert request.messages[-2]["tool_calls"][0]["function"]["name"] == "read_page"
        assert len(request.messages[-1]["content"]) > 800
        assert before.messages[-1]["content"] != request.messages[-1]["content"]
    assert len(loops.store.read_messages(RUN)) == 1 + 2 * 200 + 1
    assert all(len(content) > 800 for content in loops.contents())
    check_requests(loops.store, model.requests)
    assert check_run(loops.store, RUN) == []
    assert loops.result.usage.requests == 201


def test_the_beginning_of_the_prompt_stays_the_same_for_many_steps(loops: Loops) -> None:
    model = Reader(100)
    drive(loops.start(agent_of(model, 100, context_tokens=WINDOW)))
    pairs = zip(model.requests, model.requests[1:], strict=False)
    grown = [new.messages[: len(old.messages)] == old.messages for old, new in pairs]
    assert grown.count(False) < 20


def test_old_results_keep_the_fields_that_their_tool_wants_kept(loops: Loops) -> None:
    model = Reader(40)
    drive(loops.start(agent_of(model, 40, context_tokens=WINDOW)))
    results = [each for each in model.requests[-1].messages if each["role"] == "tool"]
    assert json.loads(results[0]["content"]).keys() == {"id"}
    assert json.loads(results[-1]["content"]).keys() == {"id", "text"}


def test_a_note_tells_what_was_called_and_found_where_blocks_are_left_out(loops: Loops) -> None:
    model = Reader(120)
    drive(loops.start(agent_of(model, 120, context_tokens=WINDOW)))
    note = model.requests[-1].messages[2]
    assert note["role"] == "user"
    assert "read_page" in note["content"]
    assert "page 99: stormy" in note["content"]


def test_without_a_limit_nothing_is_left_out_and_nothing_is_kept(loops: Loops) -> None:
    model = Reader(20, window=10**9)
    drive(loops.start(agent_of(model)))
    assert len(model.requests[-1].messages) == 2 + 2 * 20
    assert loops.store.read_view(RUN) == {}
    assert all("view" not in each["request"] for each in loops.exchanges())


@pytest.mark.parametrize("options", [{}, {"context_tokens": 3 * WINDOW}], ids=["unknown", "wrong"])
def test_a_context_that_is_smaller_than_known_is_learnt_from_the_server(
    loops: Loops, options: dict[str, Any]
) -> None:
    model = Reader(100)
    loop = loops.start(agent_of(model, 100, compaction=True, **options))
    assert drive(loop) == COMPLETED
    assert model.refused == 1
    failed = [each["error"]["type"] for each in loops.exchanges() if "error" in each]
    assert failed == ["CONTEXT_OVERFLOW"]
    check_requests(loops.store, model.requests)
    assert check_run(loops.store, RUN) == []


def test_what_a_token_is_worth_is_learnt_from_the_usage(loops: Loops) -> None:
    model = Reader(60, per_token=1.5)
    assert drive(loops.start(agent_of(model, 60, context_tokens=WINDOW))) == COMPLETED
    assert model.refused == 0
    assert loops.store.read_view(RUN)["bytes_per_token"] < 2


def test_an_agent_that_does_not_compact_ends_at_once(loops: Loops) -> None:
    model = Reader(100)
    drive(loops.start(agent_of(model, 100)))
    assert (loops.error_type, model.refused) == ("CONTEXT_OVERFLOW", 1)


class Refuses:
    """Calls a tool a few times, and from then on takes nothing."""

    def __init__(self, *turns: tuple[str, dict[str, Any]]) -> None:
        self.turns = list(turns)
        self.requests: list[ModelRequest] = []

    async def respond(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        if self.turns:
            return calls(self.turns.pop(0))
        raise ModelError("too long", type=RunErrorType.CONTEXT_OVERFLOW)


def test_a_request_that_can_not_get_shorter_is_not_sent_again(loops: Loops) -> None:
    model = Refuses()
    drive(loops.start(agent_of(model, compaction=True)))
    assert (loops.error_type, len(model.requests)) == ("CONTEXT_OVERFLOW", 1)


def test_a_request_is_made_shorter_once_and_no_more(loops: Loops) -> None:
    model = Refuses(*[("read_page", {"number": n}) for n in range(9)])
    drive(loops.start(agent_of(model, compaction=True)))
    assert loops.error_type == "CONTEXT_OVERFLOW"
    first, second = model.requests[-2:]
    assert len(model.requests) == 11
    assert len(str(second.messages)) < len(str(first.messages))
    check_requests(loops.store, model.requests)


def test_a_newest_result_that_alone_is_too_much_is_cut_for_the_retry(loops: Loops) -> None:
    class Asks(Reader):
        async def respond(self, request: ModelRequest) -> ModelReply:
            reply = await super().respond(request)
            return calls(("read_all", {})) if self.read == 1 == len(self.requests) else reply

    model = Asks(1)
    assert drive(loops.start(agent_of(model, compaction=True))) == COMPLETED
    assert model.refused == 1
    assert "of 64000 characters shown]" in model.requests[-1].messages[-1]["content"]
    assert len(loops.contents()[0]) == 64_000
    check_requests(loops.store, model.requests)


# --- summaries ------------------------------------------------------------------------------------


def test_a_summary_is_an_exchange_of_its_step_and_made_once_for_each_range(loops: Loops) -> None:
    model = Reader(120)
    loop = loops.start(agent_of(model, 120, context_tokens=WINDOW, summarize=True))
    assert drive(loop) == COMPLETED

    assert model.summaries >= 2
    ranges = [
        (each["request"]["summary"]["start"], each["request"]["view"]["dropped"])
        for each in loops.exchanges()
        if "summary" in each["request"]
    ]
    assert len(ranges) == model.summaries
    assert [start for start, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
    assert f"Summary {model.summaries}." in model.requests[-1].messages[2]["content"]
    second = next(each for each in model.requests if "Summary 1." in str(each.messages[-1]))
    assert second.tools == ()
    assert loops.result.usage == sum((_usage(each) for each in model.sizes), Usage())
    assert len(model.views) == 121
    check_requests(loops.store, model.requests)
    assert check_run(loops.store, RUN) == []


@pytest.mark.parametrize("reply", ["calls", "blank", "error"])
def test_a_summary_that_fails_leaves_the_note_in_its_place(loops: Loops, reply: str) -> None:
    class Speechless(Reader):
        async def respond(self, request: ModelRequest) -> ModelReply:
            if request.tools:
                return await super().respond(request)
            self.summaries += 1
            if reply == "error":
                raise ModelError("no", type=RunErrorType.MODEL_HTTP_ERROR, retryable=True)
            usage = _usage(7)
            return Final(" ", usage, raw="") if reply == "blank" else calls(("read_all", {}))

    model = Speechless(80)
    loop = loops.start(agent_of(model, 80, context_tokens=WINDOW, summarize=True))
    assert drive(loop) == COMPLETED
    assert model.summaries > 0
    assert "Tool calls made in it: read_page" in model.requests[-1].messages[2]["content"]
    assert loops.result.usage.requests == 81 + model.summaries


def test_a_summary_that_fails_takes_nothing_from_the_one_before(loops: Loops) -> None:
    class Tires(Reader):
        async def respond(self, request: ModelRequest) -> ModelReply:
            if request.tools or not self.summaries:
                return await super().respond(request)
            raise ModelError("no", type=RunErrorType.MODEL_HTTP_ERROR)

    model = Tires(120)
    drive(loops.start(agent_of(model, 120, context_tokens=WINDOW, summarize=True)))
    note = model.requests[-1].messages[2]["content"]
    assert "Summary 1." in note
    assert "Tool calls made in it: read_page" in note
    assert sum("summary" in each["request"] for each in loops.exchanges()) >= 2


# --- what is kept ---------------------------------------------------------------------------------


def test_another_worker_goes_on_with_the_view_of_the_first(loops: Loops) -> None:
    model = Reader(120)
    agent = agent_of(model, 120, context_tokens=WINDOW)
    first = loops.start(agent)
    step: Any = NextStep(RUN, 0)
    while not loops.store.read_view(RUN).get("view", {}).get("dropped"):
        step = first.advance(RUN, step.step)
        step = first.call_tool(RUN, step.step, 0)
    kept = loops.store.read_view(RUN)["view"]

    drive(loops.open(agent), step)

    assert loops.result.ok
    later = [each["request"]["view"]["dropped"] for each in loops.exchanges()[step.step :]]
    assert later == sorted(later)
    assert later[0] >= kept["dropped"]


def test_only_the_holder_of_the_step_may_keep_a_view(loops: Loops) -> None:
    store = loops.store
    loops.start(agent_of(Reader(1), compaction=True))
    begun: Any = store.begin_step(RUN, 0)
    assert store.keep_view(begun.record, {"view": {"dropped": 1}}) is Outcome.OK
    assert store.keep_view(begun.record, {"view": {"dropped": 1}}) is Outcome.OK
    old = replace(begun.record, epoch=begun.record.epoch - 1)
    assert store.keep_view(old, {}) is Outcome.FENCED
    cancel_run(store, RUN, "enough")
    assert store.keep_view(begun.record, {}) is Outcome.CANCELLED
    gone = replace(begun.record, run_id="run-that-never-was")
    assert store.keep_view(gone, {}) is Outcome.STALE
    assert store.read_view(RUN) == {"view": {"dropped": 1}}
    assert store.redis.exists(keys.view("run-that-never-was")) == 0


def test_a_view_expires_with_its_run_and_stays_when_it_is_resumed(loops: Loops) -> None:
    store = loops.store
    model = Refuses(*[("read_page", {"number": n}) for n in range(5)])
    loop = loops.start(agent_of(model, compaction=True))
    drive(loop)
    assert loops.error_type == "CONTEXT_OVERFLOW"
    assert store.redis.pttl(keys.view(RUN)) > 0
    assert store.resume_run(loops.record, Limits(max_steps=30)) is Outcome.OK
    assert store.redis.pttl(keys.view(RUN)) == -1
    assert store.read_view(RUN)["ceiling"] > 0
    cancel_run(store, RUN, "enough")


def test_another_model_is_not_held_to_what_was_learnt_of_the_first(loops: Loops) -> None:
    agent = agent_of(Reader(1), compaction=True)
    loops.start(agent)
    begun: Any = loops.store.begin_step(RUN, 0)

    def window(model: str) -> Window:
        history = loops.store.read_messages(RUN)
        return Window(
            loops.store, agent, begun.record, history, model=model, summarize=lambda *_: None
        )

    state = {"view": View(shrunk=1).describe(), "model": "m", "bytes_per_token": 3, "ceiling": 10}
    loops.store.keep_view(begun.record, state)
    assert window("m")._limit == 30
    assert window("n")._limit is None
    assert window("n").view.shrunk == 1
    cancel_run(loops.store, RUN, "enough")


@pytest.mark.parametrize("tokens", [0, -1, 999])
def test_a_context_that_holds_nothing_is_refused(tokens: int) -> None:
    with pytest.raises(AgentError, match="context_tokens is the model's context, 1000 tokens"):
        Agent(name="a", context_tokens=tokens)


# --- over HTTP ------------------------------------------------------------------------------------


def narrow(window: int, pages: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A server that counts tokens, answers 400 above its window, and asks for pages."""
    answered = 0

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal answered
        tokens = len(json.dumps(body)) // 4
        if tokens > window:
            told = (
                f"This model's maximum context length is {window} tokens. However, your messages "
                f"resulted in {tokens} tokens."
            )
            return model_server.error(400, "context_length_exceeded", message=told)
        usage = {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": tokens + 5}
        answered += 1
        if answered > pages:
            return model_server.final("All read.", usage=usage)
        return model_server.calls(("read_page", {"number": answered}), usage=usage)

    return reply


@pytest.mark.parametrize("options", [{"compaction": True}, {"context_tokens": 2_000}])
def test_a_server_with_a_small_window_is_sent_what_it_takes(
    loops: Loops, options: dict[str, Any]
) -> None:
    with ModelServer(narrow(2_000, 30)) as server:
        model = OpenAIModel(server.url, "key", name="m")
        assert drive(loops.start(agent_of(model, 30, **options))) == COMPLETED
        assert server.violations == []
        first = [each.body["messages"][:2] for each in server.requests]
        sent = len(server.requests)
        background.submit(model.aclose()).result(5)
    system = {"role": "system", "content": INSTRUCTIONS}
    assert first == [[system, {"role": "user", "content": "go"}]] * sent
    refused = [each for each in loops.exchanges() if "error" in each]
    assert sent == 31 + len(refused)
    assert len(refused) == (0 if "context_tokens" in options else 1)


# --- results that were cut ------------------------------------------------------------------------


@tool
def dump_table(rows: int) -> str:
    """Print a table."""
    return "row\n" * rows


def run_table(store: RunStore, rows: int) -> None:
    loops = Loops(store)
    model = Refuses(("dump_table", {"rows": rows}))
    agent = Agent(name="a", model=model, tools=[dump_table])
    drive(loops.start(agent))
    loops.close()


def test_a_result_that_was_cut_can_be_read_whole(
    make_store: MakeStore, no_leaked_keys: None
) -> None:
    store = make_store()
    run_table(store, 100_000)
    assert store.read_whole_result(RUN, "0.0") == "row\n" * 100_000
    [content] = Loops(store).contents()
    assert "of 400000 characters shown]" in content
    assert len(content) <= 65_536
    assert 0 < store.redis.pttl(keys.whole(RUN)) <= 7 * 24 * 3600 * 1000
    assert "row\n" * 20_000 not in str(store.redis.hgetall(keys.run(RUN)))
    assert len(json.dumps(store.read_trace(RUN))) < 200_000
    assert store.resume_run(store.read_run(RUN), Limits()) is Outcome.OK
    assert store.redis.pttl(keys.whole(RUN)) == -1
    cancel_run(store, RUN, "enough")
    assert store.redis.pttl(keys.whole(RUN)) > 0


def test_of_a_whole_result_only_so_much_is_kept(make_store: MakeStore) -> None:
    store = make_store(max_result_chars=80_000)
    run_table(store, 100_000)
    kept = store.read_whole_result(RUN, "0.0")
    assert kept is not None
    assert len(kept) == 80_000
    assert kept.endswith("of 400000 characters shown]")


def test_a_result_is_kept_as_the_model_got_it_where_nothing_more_is(make_store: MakeStore) -> None:
    store = make_store(max_result_chars=0)
    run_table(store, 100_000)
    kept = store.read_whole_result(RUN, "0.0")
    assert kept == Loops(store).contents()[0]
    assert store.redis.exists(keys.whole(RUN)) == 0


def test_a_result_that_was_not_cut_is_told_as_it_is(make_store: MakeStore) -> None:
    store = make_store()
    run_table(store, 3)
    assert store.read_whole_result(RUN, "0.0") == "row\n" * 3
    assert store.read_whole_result(RUN, "0.1") is None
    assert store.redis.exists(keys.whole(RUN)) == 0


def test_a_result_that_comes_too_late_is_not_kept(loops: Loops) -> None:
    store = loops.store
    loops.start(agent_of(Reader(1)))
    cancel_run(store, RUN, "enough")
    result = ToolResult(call_id="0.0", name="x", ok=True, content="x")
    outcome, _ = store.record_result(RUN, 0, 0, result, whole="y" * 9)
    assert outcome is Outcome.STALE
    assert store.redis.exists(keys.whole(RUN)) == 0
