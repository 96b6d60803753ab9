"""What holds for every run at any moment, whatever died meanwhile; broken rules come as sentences.

A pure reading of the record, in one look: nothing is changed, and no content is repeated.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from runner import keys
from runner.connection import reporting_redis_errors
from runner.models import Event, Limits, RunStatus, StopReason, ToolErrorType
from runner.record import RunRecord, parse_event, parse_record
from runner.redact import HIDDEN
from runner.store import MAX_DEATHS, RunStore

Message = dict[str, Any]

NO_KEY, NO_TTL = -2, -1
"""What Redis answers instead of a TTL."""

CALL_STATES = {"held", "queued", "parked", "running", "asked", "approval", "done"}


@dataclass(frozen=True)
class Look:
    """A run's keys as they were at one moment. Times and TTLs are in ms."""

    record: RunRecord
    messages: list[Message]
    calls: dict[str, str]
    results: dict[str, str]
    events: list[Event]
    trace: list[dict[str, Any]]
    unread: int
    sent: int
    call_count: int
    answered_by_tool: bool
    due: float | None
    expires: float | None
    ttls: dict[str, int]

    @property
    def finished(self) -> bool:
        return self.record.status is RunStatus.FINISHED

    @property
    def in_tools(self) -> bool:
        """Whether the calls of the current step are open."""
        return self.record.phase == "tools"

    @property
    def forked(self) -> tuple[int, int]:
        """The step that it began with, and how many messages it was given: 0 for one of its own."""
        first = self.trace[0] if self.trace else {}
        return (first["step"], first["messages"]) if first.get("kind") == "forked" else (0, 0)

    @property
    def begun_steps(self) -> int:
        """How many steps have their turn: the current one only while its calls are open."""
        return self.record.step + self.in_tools

    @cached_property
    def lives(self) -> list[list[Event]]:
        """The events, one list for each time that the run was taken up; a resume begins one."""
        lives: list[list[Event]] = [[]]
        for event in self.events:
            if event.type == "run.resumed":
                lives.append([])
            else:
                lives[-1].append(event)
        return lives

    @property
    def ends(self) -> int:
        """How often the run has ended, resumes included."""
        return len(self.lives) - 1 + self.finished

    @property
    def is_whole(self) -> bool:
        """Whether the event stream still has its beginning: it is capped."""
        return bool(self.events) and self.events[0].type == "run.created"

    @cached_property
    def answers(self) -> list[dict[str, Any]]:
        """The trace's entries of model calls that brought an answer which was taken."""
        return [each for each in self.trace if each.get("kind") == "model" and _is_answer(each)]


def check_run(store: RunStore, run_id: str) -> list[str]:
    """The rules that a run's record breaks, as plain sentences; none where all hold.

    May be asked at any time, of a run that runs as well. Raises `RunNotFound` where there is no
    such run.
    """
    look = _read(store, run_id)
    if isinstance(look, list):
        return look
    return [fault for check in CHECKS for fault in check(look)]


def _read(store: RunStore, run_id: str) -> Look | list[str]:
    names = [
        keys.run(run_id),
        keys.messages(run_id),
        keys.calls(run_id),
        keys.results(run_id),
        keys.evidence(run_id),
        keys.events(run_id),
        keys.trace(run_id),
        keys.view(run_id),
        keys.whole(run_id),
        keys.inbox(run_id),
        keys.sent(run_id),
    ]
    # One transaction: between two commands a run moves on.
    pipe: Any = store.redis.pipeline(transaction=True)
    pipe.hgetall(keys.run(run_id))
    pipe.lrange(keys.messages(run_id), 0, -1)
    pipe.hgetall(keys.calls(run_id))
    pipe.hgetall(keys.results(run_id))
    pipe.xrange(keys.events(run_id))
    pipe.lrange(keys.trace(run_id), 0, -1)
    pipe.llen(keys.inbox(run_id))
    pipe.scard(keys.sent(run_id))
    pipe.zscore(keys.DUE, run_id)
    pipe.zscore(keys.RUNS, run_id)
    for name in names:
        pipe.pttl(name)
    with reporting_redis_errors():
        fields, messages, calls, results, events, trace, unread, sent, due, expires, *ttls = (
            pipe.execute()
        )
    found = dict(zip(names, ttls, strict=True))
    if not fields:
        left = [name for name, ttl in found.items() if ttl == NO_TTL]
        if not left:
            store.read_run(run_id)  # raises: there is no such run
        return [f"the record is gone, but {name} stays for ever" for name in left]
    return Look(
        record=parse_record(run_id, fields, 0),
        messages=[json.loads(text) for text in messages],
        calls=calls,
        results=results,
        events=[parse_event(run_id, entry_id, entry) for entry_id, entry in events],
        trace=[json.loads(text) for text in trace],
        unread=unread,
        sent=sent,
        call_count=int(fields.get("calls") or 0),
        answered_by_tool="final" in fields,
        due=due,
        expires=expires,
        ttls=found,
    )


# --- one end, and what it does to the keys --------------------------------------------------------


def _check_end(look: Look) -> Iterator[str]:
    record, finished = look.record, look.finished
    reason = record.stop_reason or "none"
    if finished != (record.stop_reason is not None):
        yield f"the status is {record.status}, and the stop reason {reason}"
    if finished != (record.phase == "ended") or finished != (record.ended is not None):
        yield f"the status is {record.status}, in phase {record.phase}, ended at {record.ended}"
    *earlier, last = look.lives
    for number, life in enumerate(look.lives):
        ends = [each.type for each in life].count("run.finished")
        wanted = int(finished) if life is last else 1
        if ends != wanted and not (number == 0 and earlier and not look.is_whole):
            yield f"run.finished was told {ends} times instead of {wanted}"
        if ends and life[-1].type != "run.finished":
            late = [each.type for each in life[_position(life, "run.finished") :]][1:]
            yield f"after run.finished came {', '.join(late)}"


def _check_keys(look: Look) -> Iterator[str]:
    there = {name: ttl for name, ttl in look.ttls.items() if ttl != NO_KEY}
    if look.finished:
        yield from (f"{name} has no TTL after the end" for name, t in there.items() if t == NO_TTL)
        if look.due is not None and not look.record.promised:
            yield "it has ended and promised nothing, but stands in due"
        if look.expires is None or look.expires == float("inf"):
            yield "it has ended, but the index of runs doesn't say when it expires"
        return
    yield from (f"{name} has a TTL before the end" for name, ttl in there.items() if ttl != NO_TTL)
    if look.due is None:
        yield "it hasn't ended, but doesn't stand in due: nobody would look at it"
    if look.expires != float("inf"):
        yield "it hasn't ended, but the index of runs has it expire or lacks it"


# --- steps, and their turns in the history --------------------------------------------------------


def _is_answer(entry: dict[str, Any]) -> bool:
    exchanges = entry.get("exchanges") or []
    if not exchanges or "summary" in exchanges[-1].get("request", {}):
        return False  # the step failed before its model was asked
    return "error" not in exchanges[-1]


def _check_steps(look: Look) -> Iterator[str]:
    """Steps 0, 1, 2, ...: each answered by one model call that was committed, in order."""
    answered = [entry["step"] for entry in look.answers]
    if answered != sorted(set(answered)):
        yield f"the steps were committed as {answered}: not once each, in order"
    if beyond := [step for step in answered if step >= look.begun_steps]:
        yield f"steps {beyond} were committed, but the run is at step {look.record.step}"
    # A model error that ends the run takes up a step without an answer.
    missing = sorted(set(range(look.forked[0], look.begun_steps)) - set(answered))
    failed = look.ends if look.record.stop_reason is not StopReason.COMPLETED else look.ends - 1
    if len(missing) > failed:
        yield f"nothing was committed for steps {missing}"
    limits = look.record.limits
    if limits and look.record.step > limits.max_steps:
        yield f"it took {look.record.step} steps; its cap is {limits.max_steps}"
    # The call of a final tool isn't held to the cap.
    if limits and not look.record.final and look.record.tool_calls > limits.max_tool_calls:
        yield f"it made {look.record.tool_calls} calls; its cap is {limits.max_tool_calls}"


def _check_turns(look: Look) -> Iterator[str]:
    """The history: whole blocks, each the turn of one committed step, with its calls' results.

    What stands before the goal was brought along, as was what a fork began with, and no step of
    this run made it.
    """
    blocks, faults = _read_blocks(look)
    yield from faults
    start = max(look.record.goal + 1, look.forked[1])
    blocks = {at: results for at, results in blocks.items() if at >= start}
    turns: dict[int, dict[str, Any]] = {}
    lost = 0
    for entry in look.answers:
        sent = entry["exchanges"][-1]["request"]["history"]
        at = next((at for at in blocks if at >= sent), None)
        lost += at is None or at in turns
        if at is not None:
            turns[at] = entry  # an earlier entry of this place ended its run, and left no turn
    completed = look.record.stop_reason is StopReason.COMPLETED
    unasked = sorted(blocks.keys() - turns.keys())
    # Where a tool gave an answer, no model was asked for that message.
    by_tool = look.record.tool_answers + (completed and look.answered_by_tool)
    told = [at for at in unasked if _is_final(look.messages[at])][:by_tool]
    for at in unasked:
        if at not in told:
            yield f"message {at} is a turn that no committed step made"
    if lost > look.ends - completed:
        yield f"{lost} committed steps left no turn in the history"
    for at, entry in turns.items():
        yield from _check_block(look, at, entry, blocks[at])
    finals = [at for at in blocks if _is_final(look.messages[at])]
    # The run goes on after an answer where its user had said something meanwhile.
    ends = [at for at in finals if not _is_said(look.messages[at + 1 : at + 2])]
    if look.unread and not look.finished:
        ends = [at for at in ends if at < len(look.messages) - 1]  # its next step will read it
    if ends != ([len(look.messages) - 1] if completed else []):
        yield f"final answers stand at {finals} of {len(look.messages)} messages"


def _check_said(look: Look) -> Iterator[str]:
    """What its user said: each message once, in the history or still to be read."""
    start = max(look.record.goal + 1, look.forked[1])
    # What is a list has a call's images, and follows its block.
    said = [
        each
        for each in look.messages[start:]
        if each["role"] == "user" and isinstance(each["content"], str)
    ]
    kept = len(said) + look.unread
    if kept != look.sent:
        yield f"{kept} messages of its user were kept for {look.sent} that were sent"


def _is_final(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _is_said(following: Sequence[Message]) -> bool:
    return bool(following) and following[0]["role"] == "user"


def _ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or []]


def _read_blocks(look: Look) -> tuple[dict[int, list[Message]], list[str]]:
    """Position of each assistant turn -> its tool messages, and where a block isn't whole."""
    blocks: dict[int, list[Message]] = {}
    faults: list[str] = []
    turn = -1
    for at, message in enumerate(look.messages):
        if message["role"] == "assistant":
            turn = at
            blocks[at] = []
        elif message["role"] == "tool" and turn >= 0:
            blocks[turn].append(message)
        elif message["role"] == "tool":
            faults.append(f"message {at} is a result before any call")
        else:
            turn = -1
    for at, results in blocks.items():
        wanted, given = _ids(look.messages[at]), [each["tool_call_id"] for each in results]
        is_open = look.in_tools and at == len(look.messages) - 1
        if wanted != given and not is_open:
            faults.append(f"the turn at {at} has calls {wanted}, and is followed by {given}")
    if look.in_tools and not (look.messages and _ids(look.messages[-1])):
        faults.append("its calls are open, but the history doesn't end with their turn")
    return blocks, faults


def _check_block(
    look: Look, at: int, entry: dict[str, Any], results: Sequence[Message]
) -> Iterator[str]:
    step = entry["step"]
    decided = [each["provider_id"] for each in entry.get("decisions") or []]
    if decided != _ids(look.messages[at]):
        yield f"the turn at {at} isn't what step {step} decided"
        return
    first = _first_results(look)
    for index, message in enumerate(results):
        call_id = keys.call_id(step, index)
        recorded = first.get(call_id)
        if recorded is not None and HIDDEN in recorded:
            continue  # the trace hides some of it, the history doesn't
        if message["content"] != recorded and not _is_cancelled(message["content"]):
            why = "no result" if recorded is None else "another result"
            yield f"the history has a result of call {call_id}; the trace has {why} first"


def _first_results(look: Look) -> dict[str, str]:
    """Call id -> content of its first result; those that came too late to count left aside."""
    first: dict[str, str] = {}
    for entry in look.trace:
        if entry.get("late"):
            continue
        found = [entry["result"]] if entry.get("kind") == "result" else entry.get("results") or []
        for result in found:
            first.setdefault(result["call_id"], result["content"])
    return first


def _is_cancelled(content: str) -> bool:
    """Whether this is what an end puts in the place of a result that hasn't come."""
    try:
        return bool(json.loads(content)["error"]["type"] == ToolErrorType.CANCELLED)
    except (ValueError, TypeError, KeyError):
        return False


# --- calls ----------------------------------------------------------------------------------------


def _check_open_calls(look: Look) -> Iterator[str]:
    if not look.in_tools:
        if look.calls or look.results:
            yield "no calls are open, but a closed step's calls or results are still there"
        return
    states = Counter[str]()
    for index in range(look.call_count):
        call_id = keys.call_id(look.record.step, index)
        state = look.calls.get(f"{index}.state", "missing")
        states[state] += 1
        if state not in CALL_STATES:
            yield f"call {call_id} is {state}"
        if (state == "done") != (str(index) in look.results):
            has = "a" if str(index) in look.results else "no"
            yield f"call {call_id} is {state}, and has {has} result"
        started, starts = (int(look.calls.get(f"{index}.{n}") or 0) for n in ("started", "starts"))
        if started > starts:
            yield f"call {call_id} was started {started} times; it may be {starts} times"
    if strangers := look.results.keys() - set(map(str, range(look.call_count))):
        yield f"there are results of calls {sorted(strangers)}, which nobody made"
    yield from _check_waiting(look, states)
    if look.call_count <= states["done"]:
        yield "every call has its result, but the step is still open"
    in_flight = states["queued"] + states["parked"] + states["running"]
    most = (look.record.limits or Limits()).max_parallel_calls
    if in_flight > most:
        yield f"{in_flight} calls are in flight; the limit is {most}"


def _check_waiting(look: Look, states: Counter[str]) -> Iterator[str]:
    """A run waits for a person when nothing else moves, and only then."""
    asked = states["asked"] + states["approval"]
    moving = states["held"] + states["queued"] + states["parked"] + states["running"]
    waits = look.record.status is RunStatus.WAITING
    if waits != (asked > 0 and moving == 0):
        yield f"it is {look.record.status}, with {asked} calls for a person and {moving} that move"


def _check_events(look: Look) -> Iterator[str]:
    """What followers were told: no step and no call goes on after its answer, and none is lost."""
    over: set[str] = set()
    queued: dict[str, int] = {}
    for event in look.events:
        what = _subject(event)
        if event.type in ("model.answered", "call.finished"):
            if what in over:
                yield f"{what} was answered twice"
            over.add(what)
        elif event.type in ("call.queued", "approval.requested"):
            queued[what] = event.step or 0
        elif event.type in ("step.started", "call.started") and what in over:
            yield f"{what} was started after it was answered"
    for what, step in queued.items():
        if what not in over and (look.finished or step < look.record.step):
            yield f"{what} has no result, though its step is over"


def _check_attempts(look: Look) -> Iterator[str]:
    attempts: dict[str, int] = defaultdict(int)
    for event in look.events:
        if event.type not in ("step.started", "call.started"):
            continue
        what, attempt = _subject(event), int(str(event.data["attempt"]))
        if event.type == "step.started":
            if attempt > MAX_DEATHS:
                yield f"{what} was tried {attempt} times; {MAX_DEATHS} is the most"
        elif attempt < attempts[what]:
            yield f"the attempts of {what} go back from {attempts[what]} to {attempt}"
        attempts[what] = attempt


def _subject(event: Event) -> str:
    return f"call {event.call}" if event.call else f"step {event.step}"


def _position(events: Sequence[Event], type: str) -> int:
    return [each.type for each in events].index(type)


CHECKS = (
    _check_end,
    _check_keys,
    _check_steps,
    _check_turns,
    _check_said,
    _check_open_calls,
    _check_events,
    _check_attempts,
)
