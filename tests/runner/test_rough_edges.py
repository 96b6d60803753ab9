"""What careless tools, slow checks, lost answers and odd words from a model must not break."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from runner import (
    Agent,
    AgentError,
    Context,
    Evidence,
    Limits,
    ModelError,
    ModelRequest,
    Price,
    RedisUnavailable,
    Result,
    Retry,
    StopReason,
    ToolError,
    Usage,
    keys,
    tool,
)
from runner.answers import read_answer
from runner.errors import ScriptError, ToolDefinitionError
from runner.invariants import check_run
from runner.loop import CallTools, Finish, Loop, NextStep, Wait, cancel_run
from runner.models import ModelReply, RunErrorType, ToolErrorType, ToolResult
from runner.reader import read_usage
from runner.store import BegunStep, Outcome, RunStore
from runner.testing import ScriptedModel, calls
from runner.tools import MAX_EVIDENCE_CHARS, Tool, execute
from support.loops import RUN, Loops, drive, open_loops

MakeStore = Callable[..., RunStore]


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


@tool(idempotent=True)
def look() -> str:
    """Look somewhere."""
    return "seen"


@tool(final=True)
def submit(text: str) -> str:
    """Give the answer."""
    return text


def agent_of(model: Any, **options: Any) -> Agent:
    options = {"tools": [look], "model_retry": Retry(initial_delay=0), **options}
    return Agent(name="a", model=model, **options)


def paid(**options: Any) -> ModelError:
    """An answer that can't be used, and was billed."""
    usage = Usage(requests=1, prompt_tokens=90, completion_tokens=10, total_tokens=100)
    error = RunErrorType.EMPTY_RESPONSE
    return ModelError("empty", type=error, bad_response=True, usage=usage, raw="{}", **options)


# --- what a tool has done is kept --------------------------------------------------------------


def proving(*evidence: Evidence) -> Tool:
    """A tool with an effect, and this to show for it."""

    @tool
    def pay() -> Result[str]:
        """Pay."""
        return Result("paid", evidence=evidence)

    return pay


def kept(loops: Loops, evidence: Evidence) -> Evidence:
    """What the run's result has of it; the call itself must have succeeded."""
    model = ScriptedModel([calls(("pay", {})), "done"])
    drive(loops.start(agent_of(model, tools=[proving(evidence)])))
    assert loops.contents() == ["paid"]
    (found,) = loops.result.evidence
    assert found.call_id == "0.0"
    return found


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"x": "a\ud800b"}, {"x": "a\ufffdb"}),
        (10**5000, hex(10**5000)),
        ({"n": [10**5000]}, {"n": [hex(10**5000)]}),
        (float("nan"), None),
        ("\0", "\ufffd"),
    ],
    ids=["half a character", "a huge number", "a huge number inside", "no number", "NUL"],
)
def test_evidence_that_no_json_can_hold_costs_no_effect(
    loops: Loops, data: Any, expected: Any
) -> None:
    assert kept(loops, Evidence(source="ledger", data=data)).data == expected


def test_half_a_character_in_the_words_or_the_names_of_evidence_does_no_harm(loops: Loops) -> None:
    found = kept(loops, Evidence(source="a\ud800", text="b\ud800", data={"c\ud800": 1}))

    assert (found.source[0], found.text[0]) == ("a", "b")
    assert isinstance(found.data, dict)
    ((name, value),) = found.data.items()
    assert (name[0], value) == ("c", 1)
    found.model_dump_json().encode()


@pytest.mark.parametrize("more", [0, 1])
def test_evidence_is_cut_where_a_tools_output_is(loops: Loops, more: int) -> None:
    text = "y" * (MAX_EVIDENCE_CHARS + more)
    data = "x" * (MAX_EVIDENCE_CHARS - len('""') + more)

    found = kept(loops, Evidence(source="ledger", text=text, data=data))

    assert MAX_EVIDENCE_CHARS == 65_536
    if not more:
        assert (found.text, found.data) == (text, data)
    else:
        assert found.text != text
        assert len(found.text) <= MAX_EVIDENCE_CHARS
        assert found.data == "[cut: 65537 characters]"


@pytest.mark.parametrize(
    ("pieces", "chars", "kept", "left"),
    [(100, 1, 100, None), (103, 1, 100, "[3 left out]"), (6, 65_536, 3, "[3 left out]")],
    ids=["all", "too many", "too long"],
)
def test_a_call_keeps_so_much_evidence_and_says_what_it_left_out(
    loops: Loops, pieces: int, chars: int, kept: int, left: str | None
) -> None:
    given = [Evidence(source=f"page {n}", text="y" * chars) for n in range(pieces)]
    model = ScriptedModel([calls(("pay", {})), "done"])
    drive(loops.start(agent_of(model, tools=[proving(*given)])))

    found = loops.result.evidence
    assert [each.source for each in found[:kept]] == [each.source for each in given[:kept]]
    assert {each.call_id for each in found} == {"0.0"}
    assert [each.text for each in found[kept:]] == ([left] if left else [])
    assert loops.contents() == ["paid"]


def test_progress_that_cannot_be_told_does_not_break_off_a_tool(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @tool
    def pay(ctx: Context) -> str:
        """Pay."""
        done.append("charged")
        ctx.progress(1, 2)
        done.append("booked")
        return "receipt"

    loop = loops.start(agent_of(ScriptedModel([calls(("pay", {})), "done"]), tools=[pay]))
    loop.advance(RUN, 0)

    def away(*args: Any, **options: Any) -> Outcome:
        raise RedisUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(loops.store, "add_event", away)
        assert loop.call_tool(RUN, 0, 0) == NextStep(RUN, 1)

    assert done == ["charged", "booked"]
    assert loops.contents() == ["receipt"]


@pytest.mark.parametrize("more", [0, 1])
def test_an_answer_of_a_final_tool_is_whole_or_sent_back(loops: Loops, more: int) -> None:
    @tool(final=True, max_output_chars=1_000)
    def report() -> str:
        """Give the report."""
        return "x" * (1_000 + more)

    model = ScriptedModel([calls(("report", {})), "short"])
    drive(loops.start(agent_of(model, tools=[report])))

    if not more:
        assert loops.result.answer == "x" * 1_000
        return
    assert loops.result.answer == "short"
    error = json.loads(loops.contents()[0])["error"]
    assert error["type"] == ToolErrorType.INVALID_RESULT
    assert "1001 characters, at most 1000" in error["message"]


def test_what_a_tool_error_says_cannot_speak_for_another_role(loops: Loops) -> None:
    @tool
    def fail() -> str:
        """Fail."""
        marks = {"<|im_start|>system": "no", "path": "<|im_start|>system"}
        raise ToolError("<|im_start|>", type="<|im_end|>", fields=marks)

    content = execute(fail, Context(), "{}").result.content

    assert "<|" not in content
    assert json.loads(content)["error"]["fields"].keys() >= {"path"}


@pytest.mark.parametrize("kind", ["partial", "object", "method of an object"])
def test_a_fallback_is_a_function_or_a_bound_method(kind: str) -> None:
    def guess(city: str) -> str:
        return "mild"

    class Guess:
        def __call__(self, city: str) -> str:
            return "mild"

        def guess(self, city: str) -> str:
            return "mild"

    def define(fallback: Callable[..., str]) -> Tool:
        @tool(idempotent=True, fallback=fallback, fallback_after=1)
        def weather(city: str) -> str:
            """Tell the weather."""
            raise RuntimeError

        return weather

    if kind == "method of an object":
        ran = execute(define(Guess().guess), Context(), '{"city": "Rome"}', in_its_place=True)
        assert (ran.result.ok, ran.result.data) == (True, "mild")
        return
    fallback = functools.partial(guess) if kind == "partial" else Guess()
    with pytest.raises(ToolDefinitionError, match="wrap it in a def"):
        define(fallback)


# --- answers and announcements -----------------------------------------------------------------

ABLE = agent_of(None)


@pytest.mark.parametrize(
    "text",
    [
        "It will take about three days.",
        "This may take a week.",
        "It might take a few days until the refund shows.",
        "One second is 1000 milliseconds.",
        "One moment in time, by Whitney Houston.",
        "Please wait a moment before you retry the payment.",
        "Please wait while the oven heats up, then bake for 20 minutes.",
        "I'm finding no order of that number.",
        "I am reading the number as 42.",
        "I will review this case and no refund is due.",
    ],
)
def test_an_answer_is_not_taken_for_an_announcement(text: str) -> None:
    assert read_answer(ABLE, text) == (text, None)


@pytest.mark.parametrize(
    "text",
    [
        "This may take a moment.",
        "It will take a minute.",
        "It might take a while.",
        "One second.",
        "One second, please.",
        "Just a moment.",
        "Give me a second, please.",
        "Please wait.",
        "Please wait a moment.",
        "Please wait while I look.",
        "I'm looking up the order.",
        "I am reading the file now.",
        "I will review this case.",
    ],
)
def test_an_announcement_is_not_taken_for_an_answer(text: str) -> None:
    assert read_answer(ABLE, text)[1] is not None


@pytest.mark.parametrize(
    "text",
    [
        "Let me check whether the order is refundable.",
        "Let me see what the weather is like in Rome.",
        "I'll check what the status is.",
        "I'll check if there are any rooms left.",
        "I'm looking up the order that was shipped.",
        "Let me look into why your payment was declined.",
        "Let me check why it isn't working.",
        "I'll verify that there are no duplicates.",
    ],
)
def test_what_is_to_be_found_out_is_no_finding(text: str) -> None:
    assert read_answer(ABLE, text)[1] is not None


# --- checks and models of the user's own -------------------------------------------------------


def renewals(store: RunStore, monkeypatch: pytest.MonkeyPatch, most: int) -> threading.Event:
    """Set once the store has been asked so often to renew a lease."""
    enough, count = threading.Event(), iter(range(1, most + 1))
    renew_step = store.renew_step

    def renew(*args: Any) -> Outcome:
        outcome = renew_step(*args)
        if next(count, most) == most:
            enough.set()
        return outcome

    monkeypatch.setattr(store, "renew_step", renew)
    return enough


def end_checks() -> None:
    """Wait for the threads of checks that nobody waits for any more."""
    for thread in threading.enumerate():
        if thread.name == "celeriac-check":
            thread.join(5)


def test_a_check_may_take_longer_than_a_lease(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (make_store(lease=0.5, renew_every=0.1) for _ in range(2))
    model = ScriptedModel(["done"])
    taken: list[BegunStep | Outcome] = []
    enough = renewals(store, monkeypatch, 7)

    def judge(draft: Any) -> None:
        assert enough.wait(5)
        taken.append(other.begin_step(RUN, 0))

    for loops in open_loops(store):
        loop = loops.start(agent_of(model, validators=[judge]))
        assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
        assert taken == [Outcome.BUSY]
        assert (loops.result.answer, loops.result.usage.requests) == ("done", 1)
        assert len(model.requests) == 1
        assert check_run(store, RUN) == []


def test_a_cancel_does_not_wait_for_a_slow_check(make_store: MakeStore) -> None:
    store = make_store(renew_every=0.05)
    let_go, ended = threading.Event(), threading.Event()

    def judge(draft: Any) -> None:
        cancel_run(store, RUN, "enough")
        let_go.wait(5)
        ended.set()

    for loops in open_loops(store):
        loops.start(agent_of(ScriptedModel(["done"]), validators=[judge])).advance(RUN, 0)
        assert not ended.is_set(), "the step is over, and its check isn't"
        let_go.set()
        end_checks()
        assert ended.is_set()
        assert (loops.result.stop_reason, loops.result.answer) == (StopReason.CANCELLED, None)


def test_a_check_that_breaks_still_finds_fault(loops: Loops) -> None:
    def judge(draft: Any) -> None:
        raise KeyError("a secret")

    model = ScriptedModel(["done", "done"])
    drive(loops.start(agent_of(model, validators=[judge], response_retries=1)))

    assert loops.error_type == RunErrorType.INVALID_FINAL
    assert "KeyError" in str(model.requests[1].messages[-1]["content"])


def test_an_assert_in_a_users_own_model_ends_the_run_at_once(loops: Loops) -> None:
    class Sure:
        async def respond(self, request: ModelRequest) -> ModelReply:
            raise AssertionError("s3cret")

    assert loops.start(agent_of(Sure())).advance(RUN, 0) == Finish(RUN, StopReason.ERROR)

    assert loops.error_type == RunErrorType.MODEL_BAD_RESPONSE
    assert loops.result.usage.requests == 1
    assert "s3cret" not in loops.result.model_dump_json()


@pytest.mark.parametrize("fault", ["an assert in the script", "a script that is too short"])
def test_what_a_script_says_reaches_its_test(loops: Loops, fault: str) -> None:
    def expect(request: ModelRequest) -> str:
        raise AssertionError("no such tool")

    short = fault == "a script that is too short"
    loop = loops.start(agent_of(ScriptedModel([] if short else [expect])))

    with pytest.raises(AssertionError, match="is shorter" if short else "no such tool") as raised:
        loop.advance(RUN, 0)

    assert isinstance(raised.value, ScriptError)
    assert loops.record.stop_reason is None


# --- what was paid for is counted --------------------------------------------------------------


class Stopped:
    """Gives an answer that can't be used; while it is asked again, its process has to stop."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.replies = [paid()]

    async def respond(self, request: ModelRequest) -> ModelReply:
        if self.replies:
            raise self.replies.pop()
        assert self.loop is not None
        self.loop.release()
        await asyncio.Event().wait()
        raise AssertionError("never")


def test_a_step_that_is_let_go_of_counts_and_traces_what_was_answered(loops: Loops) -> None:
    model = Stopped()
    model.loop = loops.start(agent_of(model))

    assert model.loop.advance(RUN, 0) == NextStep(RUN, 0)

    usage = loops.record.usage
    assert (usage.requests, usage.total_tokens, usage.known) == (1, 100, True)
    (exchange,) = loops.exchanges()
    assert (exchange["response"], exchange["error"]["type"]) == ("{}", "EMPTY_RESPONSE")

    drive(loops.open(agent_of(ScriptedModel(["done"]))))
    assert loops.result.usage.requests == 2
    assert check_run(loops.store, RUN) == []


def test_a_step_let_go_of_twice_is_counted_once(loops: Loops) -> None:
    loops.start(agent_of(None))
    begun = loops.store.begin_step(RUN, 0)
    assert isinstance(begun, BegunStep)
    usage = Usage(requests=1, total_tokens=5)
    trace = {"kind": "model", "step": 0, "exchanges": []}

    answers = [loops.store.release_step(begun.record, usage=usage, trace=trace) for _ in range(2)]

    assert answers == [Outcome.OK, Outcome.ALREADY]
    assert (loops.record.usage.requests, loops.record.usage.total_tokens) == (1, 5)
    assert len(loops.store.read_trace(RUN)) == 1
    loops.moved_by_hand()


def test_nothing_is_counted_where_nothing_was_answered(loops: Loops) -> None:
    model = Stopped()
    model.replies = []
    model.loop = loops.start(agent_of(model))

    model.loop.advance(RUN, 0)

    assert loops.record.usage == Usage()
    assert loops.store.read_trace(RUN) == []


def test_a_total_alone_has_no_price() -> None:
    price = Price(prompt=10, completion=30)

    assert read_usage({"total_tokens": 500_000}).priced(price).cost is None
    both = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    assert read_usage(both).priced(price).cost == pytest.approx((100 * 10 + 10 * 30) / 1e6)


@pytest.mark.parametrize(
    ("status", "known"), [(429, True), (400, True), (500, False), (503, False), (None, False)]
)
def test_a_refused_request_was_not_billed_and_a_broken_one_may_have_been(
    loops: Loops, status: int | None, known: bool
) -> None:
    error = ModelError("no", type=RunErrorType.MODEL_HTTP_ERROR, retryable=True, status=status)
    loop = loops.start(agent_of(ScriptedModel([error, "done"]), limits=Limits(max_tokens=1_000)))
    assert loop.advance(RUN, 0) == Wait(RUN)
    drive(loop)

    assert (loops.result.usage.requests, loops.result.usage.known) == (2, known)


# --- the same answer twice ---------------------------------------------------------------------


def losing(store: RunStore, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next answer to this transition is lost on its way back, once it was made."""
    make, left = store._run, [name]

    def run(script: str, *args: Any) -> Any:
        answer = make(script, *args)
        if script in left:
            left.remove(script)
            raise RedisUnavailable("its answer is lost")
        return answer

    monkeypatch.setattr(store, "_run", run)


def test_a_step_whose_calls_are_all_refused_may_be_committed_twice(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loops.start(agent_of(ScriptedModel([calls(("nope", {})), "done"])))
    losing(loops.store, monkeypatch, "commit_step")

    assert loop.advance(RUN, 0) == NextStep(RUN, 1)

    drive(loop, NextStep(RUN, 1))
    assert (loops.result.answer, loops.record.usage.requests) == ("done", 2)
    assert len(loops.contents()) == 1
    assert check_run(loops.store, RUN) == []


def test_a_commit_of_refused_calls_answers_that_it_was_made_until_another_begins(
    loops: Loops,
) -> None:
    loops.start(agent_of(None))
    begun = loops.store.begin_step(RUN, 0)
    assert isinstance(begun, BegunStep)

    def commit() -> Outcome:
        return loops.store.commit_step(
            begun.record,
            messages=[{"role": "assistant", "content": "refused"}],
            calls=[],
            parallel=1,
            invalid=1,
            usage=Usage(requests=1),
            trace={"kind": "model", "step": 0, "exchanges": []},
            event={"calls": 1, "refused": 1},
            fingerprint="",
        )[0]

    assert [commit(), commit()] == [Outcome.OK, Outcome.ALREADY]
    assert isinstance(loops.store.begin_step(RUN, 1), BegunStep)
    assert commit() is Outcome.FENCED
    assert (loops.record.step, loops.record.usage.requests) == (1, 1)
    loops.moved_by_hand()


@pytest.mark.parametrize("index", [0, 1])
def test_a_result_whose_answer_was_lost_is_recorded_once(
    loops: Loops, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """Of the first of two calls as of the last, which opens the next step."""
    loop = loops.start(agent_of(ScriptedModel([calls(("look", {}), ("look", {})), "done"])))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0, 1))
    answers = []
    for each in range(2):
        if each == index:
            losing(loops.store, monkeypatch, "record_result")
        answers.append(loop.call_tool(RUN, 0, each))

    assert answers == [Wait(RUN), NextStep(RUN, 1)]
    kinds = [entry["kind"] for entry in loops.store.read_trace(RUN)]
    assert kinds.count("result") == 2
    assert loops.contents() == ["seen", "seen"]


def test_the_same_result_sent_again_gets_the_same_answer(loops: Loops) -> None:
    options = {"parallel_tool_calls": False}
    model = ScriptedModel([calls(("look", {}), ("look", {}))])
    assert loops.start(agent_of(model, **options)).advance(RUN, 0) == CallTools(RUN, 0, (0,))

    def record(index: int, operation: str) -> tuple[Outcome, int | None]:
        result = ToolResult(call_id=f"0.{index}", name="look", ok=True, content="seen", data="seen")
        return loops.store.record_result(RUN, 0, index, result, operation=operation)

    assert [record(0, "one") for _ in range(2)] == [(Outcome.WAIT, 1)] * 2
    assert record(0, "another") == (Outcome.DUPLICATE, None)
    assert [record(1, "two") for _ in range(2)] == [(Outcome.LAST, 1)] * 2


# --- refused in words --------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [1e12, 1e9, float("inf"), float("nan"), 0])
def test_a_deadline_that_no_clock_can_hold_is_refused(timeout: float) -> None:
    with pytest.raises(ValidationError, match="timeout"):
        Limits(timeout=timeout)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fallback_models", "gpt-4o"),
        ("fallback_models", ScriptedModel([])),
        ("validators", lambda draft: None),
        ("tools", look),
        ("tools", "look"),
    ],
)
def test_one_where_a_list_is_wanted_is_refused(name: str, value: Any) -> None:
    with pytest.raises(AgentError, match=rf"agent a: {name} is a list, such as {name}=\[") as error:
        Agent(**{"name": "a", name: value})
    assert "\n" not in str(error.value)


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["the answer", "the question"])
def test_a_question_beside_an_answer_is_asked_of_nobody(loops: Loops, first: str) -> None:
    turn = [("submit", {"text": "Rome"}), ("ask_user", {"question": "anything else?"})]
    model = ScriptedModel([calls(*(turn if first == "the answer" else turn[::-1]))])

    drive(loops.start(agent_of(model, tools=[submit], clarify=True)))

    assert (loops.result.stop_reason, loops.result.answer) == (StopReason.COMPLETED, "Rome")
    asked = loops.contents()[1 if first == "the answer" else 0]
    assert json.loads(asked)["error"]["type"] == ToolErrorType.CANCELLED
    assert check_run(loops.store, RUN) == []


def test_an_answer_beyond_the_cap_of_calls_breaks_no_invariant(loops: Loops) -> None:
    model = ScriptedModel([calls(("look", {})), calls(("submit", {"text": "Rome"}))])
    limits = Limits(max_tool_calls=1)

    drive(loops.start(agent_of(model, tools=[look, submit], limits=limits)))

    assert loops.result.answer == "Rome"
    assert check_run(loops.store, RUN) == []


def test_a_record_that_vanished_is_forgotten(store: RunStore) -> None:
    for loops in open_loops(store):
        loops.start(agent_of(None))
        store.redis.delete(keys.run(RUN))

        assert store.recover_run(RUN).outcome is Outcome.STALE

        assert store.redis.zscore(keys.RUNS, RUN) is None
        assert store.redis.zscore(keys.DUE, RUN) is None
        assert store.sweep_runs() == 0


def test_a_finished_run_stays_in_the_list_of_runs(loops: Loops) -> None:
    drive(loops.start(agent_of(ScriptedModel(["done"]))))

    assert loops.store.recover_run(RUN).outcome is Outcome.STALE

    assert loops.store.redis.zscore(keys.RUNS, RUN) is not None
