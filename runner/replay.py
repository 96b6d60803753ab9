"""Replays a run: what its models answered and its tools returned goes through the loop once more.

The same history must come out, with the same decisions, end and usage. Nothing is asked and no tool
runs; what changes the state is the same code and the same transitions, on a store of its own.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from pydantic import JsonValue

from runner import keys
from runner.agents import Agent, Agents
from runner.calls import CallRunner
from runner.errors import CeleriacError, InvalidInput, ModelError, ScriptError
from runner.images import Image
from runner.loop import Loop, Next, Wait, answer_question, cancel_run
from runner.models import (
    Decided,
    Limits,
    Model,
    ModelReply,
    ModelRequest,
    ProposedCall,
    RunError,
    RunErrorType,
    StopReason,
    ToolCalls,
    ToolErrorInfo,
    ToolErrorType,
    ToolResult,
    Usage,
)
from runner.nudge import Nudges
from runner.record import RunRecord, digest, dump
from runner.recording import Recording
from runner.redact import HIDDEN, redact
from runner.replies import rebuild_reply
from runner.settings import Settings
from runner.store import MAX_DEATHS, Outcome, RunStore
from runner.tools import Executed

Entry = Mapping[str, Any]

FAR = 10 * 365 * 86_400_000
"""Milliseconds: no deadline passes during a replay. Where one did, the recording says so."""

VOLATILE = {"epoch", "at", "duration_ms", "agent", "hidden"}
"""What differs each time that an entry is made, or is told on its own."""

OPEN_STATES = ("asked", "approval", "held", "parked", "queued")
"""States of a call that hasn't its result yet."""

PLAIN_FIELDS = ("kind", "type", "stop_reason", "limit", "name", "model")
"""Fields whose text is a word of ours or a name, so that it may be shown."""


# --- what comes out -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that came out otherwise: where it stands, and what was and what is there.

    `field` is a path, such as `decisions[0].arguments`. Its text tells sizes and digests alone, as
    the values may be anybody's words; `show` tells them.
    """

    step: int | None
    call: str | None
    field: str
    recorded: JsonValue = dataclasses.field(repr=False)
    replayed: JsonValue = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.describe()

    def describe(self, *, show: bool = False) -> str:
        """One line; with `show` it holds both values as JSON."""
        recorded, replayed = (
            dump(each) if show else self._outline(each) for each in (self.recorded, self.replayed)
        )
        return f"{self.place}, {self.field}: recorded {recorded}, replayed {replayed}"

    @property
    def place(self) -> str:
        if self.call is not None:
            return f"call {self.call}"
        return "the end" if self.step is None else f"step {self.step}"

    def _outline(self, value: JsonValue) -> str:
        if value is None:
            return "nothing"
        word = self.field.rpartition(".")[2] in PLAIN_FIELDS
        if isinstance(value, bool | int | float) or (isinstance(value, str) and word):
            return str(value)
        text = value if isinstance(value, str) else dump(value)
        hashed = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{len(text)} characters ({hashed[:12]})"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay has found.

    `changed`: the agent isn't the one that was recorded (its instructions, tools or output type).
    `hidden` are steps of which something is hidden, so that not all of it can be compared; from
    `blind_from` on nothing can be, since what was hidden decides how the run goes on.
    """

    run_id: str
    differences: tuple[Difference, ...]
    changed: bool
    steps: int
    hidden: tuple[int, ...] = ()
    blind_from: int | None = None

    @property
    def same(self) -> bool:
        """Whether nothing that can be compared came out otherwise."""
        return not self.differences

    def as_dict(self, *, show: bool = False) -> dict[str, JsonValue]:
        """The same for a script; with the values that differ where they are to be shown."""
        told: list[JsonValue] = []
        for each in self.differences:
            values = {"recorded": each.recorded, "replayed": each.replayed} if show else {}
            place = {"step": each.step, "call": each.call, "field": each.field}
            told.append({**place, "text": each.describe(), **values})
        return {
            "run_id": self.run_id,
            "same": self.same,
            "changed_agent": self.changed,
            "differences": told,
            "hidden_steps": list(self.hidden),
            "blind_from": self.blind_from,
        }


def replay(recording: Recording, agent: Agent) -> Replayed:
    """Replay a run with this agent; the checks of its answers (`validators`) do run.

    Raises `InvalidInput` where the trace can't be read, and `CeleriacError` where the extra
    `testing` isn't installed.
    """
    player = _Player(recording, agent)
    try:
        player.play()
    finally:
        player.close()
    return player.found()


# --- what takes the place of the world ----------------------------------------------------------


class NothingRecorded(ScriptError):
    """The replay asks a model where the recording has no answer: the loop lets it through."""


class _Answers:
    """Stands in for every model: answers what was recorded, in order."""

    def __init__(self) -> None:
        self.left: deque[Callable[[], ModelReply | None]] = deque()

    async def respond(self, request: ModelRequest) -> ModelReply:  # noqa: ARG002 - as recorded
        if not self.left:
            raise NothingRecorded
        # What is no reply at all (None) broke the recorded attempt off as well.
        return self.left.popleft()()  # type: ignore[return-value]


class _NamedAnswers:
    """The same under the name of a model object that the agent holds."""

    def __init__(self, name: str, answers: _Answers) -> None:
        self.name = name
        self._answers = answers

    async def respond(self, request: ModelRequest) -> ModelReply:
        return await self._answers.respond(request)


class _Results(CallRunner):
    """Stands in for the tools: a call's result is the recorded one, and no body runs."""

    next: Executed

    def run(self, *_: object) -> Executed:
        return self.next


class _Unheard(Nudges):
    """Nobody ends a replayed run from outside."""

    @contextlib.contextmanager
    def watch(self, *_: object) -> Iterator[None]:
        yield


class _ReplayLoop(Loop):
    """The loop, with the recording's word for what depends on time or on chance."""

    def __init__(self, store: RunStore, agent: Agent, answers: _Answers) -> None:
        settings = store.settings
        super().__init__(store, Agents([agent]), settings=settings, model=answers)
        self._nudges = _Unheard(store)
        self._calls = self.results = _Results(store, settings.renew_every, None)
        self.out_of_time = False
        self.default_model = ""
        self.may_stop = False

    def _retry_delay(self, agent: Agent, record: RunRecord, error: ModelError) -> float | None:
        delay = super()._retry_delay(agent, record, error)
        return math.inf if delay is not None and self.out_of_time else delay

    def _model_name(self, model: str | Model | None) -> str:
        # A setting of the worker that made the step; two workers needn't have the same.
        return self.default_model if model is None else super()._model_name(model)

    def _admit(self, agent: Agent, record: RunRecord) -> Outcome:  # noqa: ARG002 - it had its turn
        return Outcome.OK

    def _stop(self, record: RunRecord, outcome: Outcome) -> Next:
        # After a fatal result others may have come, before the end did: that has its own place.
        if outcome is Outcome.FAILED and not self.may_stop:
            return Wait(record.run_id)
        return super()._stop(record, outcome)

    def end(self, record: RunRecord, outcome: Outcome) -> None:
        """End the run for a reason that was seen from outside of its steps."""
        self._stop(record, outcome)


def open_scratch() -> redis.Redis:
    """An empty Redis inside of this process."""
    # fakeredis needs lupa for scripts, and would only say so at the first one.
    if not all(map(importlib.util.find_spec, ("fakeredis", "lupa"))):
        raise CeleriacError(
            "a replay needs a Redis inside of this process: pip install 'celeriac[testing]'"
        )
    import fakeredis

    client: redis.Redis = fakeredis.FakeRedis(server=fakeredis.FakeServer(), decode_responses=True)
    return client


# --- the replay itself --------------------------------------------------------------------------


class _WentAnotherWay(Exception):
    """What was recorded next can't happen here; the difference says what is."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class _Player:
    """Walks along a recording's trace: an entry that isn't there yet is made to happen."""

    def __init__(self, recording: Recording, agent: Agent) -> None:
        self.recording = recording
        self.run_id = recording.run_id
        self.agent = agent
        self.differences: list[Difference] = []
        self.hidden: list[int] = []
        self.blind_from: int | None = None
        self.answers = _Answers()
        settings = Settings(redact=tuple(sorted(recording.names)))
        self.store = RunStore(settings, open_scratch())
        self.redis = self.store.redis
        self.loop = _ReplayLoop(self.store, self._stand_in(agent), self.answers)

    def play(self) -> None:
        try:
            self._walk()
        except _WentAnotherWay as way:
            self.differences.append(way.difference)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"the trace of run {self.run_id} can't be read: it is damaged, or hides fields "
                "that it needs itself (then give those that are to be hidden other names)"
            ) from error

    def _walk(self) -> None:
        self._create()
        for at, entry in enumerate(self.recording.trace):
            if "hidden" in entry:
                self.hidden.append(int(entry["step"]))
            if self._made() <= at:
                self._make(entry)
            self._compare_entry(entry, at)
        self._end_as_recorded()
        if self._made() > len(self.recording.trace):
            extra = self._entry(len(self.recording.trace))
            self._differ(*_place(extra), "kind", None, extra["kind"])
        self._compare_messages()
        self._compare_end()

    def close(self) -> None:
        self.loop.close()
        self.redis.close()

    def found(self) -> Replayed:
        differences = [each for each in self.differences if not self._is_blind(each)]
        blind = self.blind_from if len(differences) < len(self.differences) else None
        told = [entry["agent"] for entry in self.recording.trace if "agent" in entry]
        return Replayed(
            run_id=self.run_id,
            differences=tuple(differences),
            changed=any(each["fingerprint"] != self.agent.fingerprint for each in told),
            steps=self.recording.run.step,
            hidden=tuple(sorted(set(self.hidden))),
            blind_from=blind,
        )

    def _stand_in(self, agent: Agent) -> Agent:
        """The agent, asking nobody."""

        def quiet(model: str | Model) -> str | Model:
            if isinstance(model, str):
                return model
            name = getattr(model, "name", None) or type(model).__name__
            return _NamedAnswers(name, self.answers)

        return dataclasses.replace(
            agent,
            name=self.recording.run.agent,
            model=None if agent.model is None else quiet(agent.model),
            fallback_models=[quiet(each) for each in agent.fallback_models],
        )

    # --- the run, and what happens to it ---------------------------------------------------------

    def _create(self) -> None:
        recorded, trace = self.recording, self.recording.trace
        record = recorded.run
        sent = [exchange["request"]["history"] for _, exchange in recorded.exchanges()]
        messages = recorded.messages[: sent[0]] if sent else recorded.messages
        lives = [entry for entry in trace if entry["kind"] == "resumed"]
        limits = _limits(lives[0]["before"]["limits"]) if lives else record.limits
        if trace and trace[0]["kind"] == "forked":
            step = trace[0]["step"]
            self.store.fork_run(
                run_id=self.run_id,
                agent=record.agent,
                step=step,
                messages=messages,
                evidence=[each for each in recorded.evidence if _step_in(each.call_id) < step],
                trace=dict(trace[0]),
                limits=limits or Limits(),
                principal=record.principal,
                metadata=record.metadata,
                goal=record.goal,
            )
        else:
            self.store.create_run(
                run_id=self.run_id,
                agent=record.agent,
                messages=messages,
                limits=limits,
                principal=record.principal,
                metadata=record.metadata,
            )
            # What the user sent before the first step stands behind it.
            self.redis.hset(keys.run(self.run_id), "goal", record.goal)
        self._put_off_deadline()

    def _put_off_deadline(self) -> None:
        record = self._record()
        self.redis.hset(keys.run(self.run_id), "deadline", record.created + FAR)

    def _make(self, entry: Entry) -> None:
        """Let happen what this entry tells of."""
        match entry["kind"]:
            case "model":
                self._take_step(entry)
            case "passed_on":
                self._keep(entry)
            case "result" | "retried_result":
                if _changed_nothing(entry):
                    self._keep(entry)
                else:
                    self._bring_result(entry)
            case "resumed":
                self._resume(entry)
            case _:
                raise ValueError("an entry of an unknown kind")

    def _keep(self, entry: Entry) -> None:
        """What changed nothing: it came too late, or was passed on to another worker."""
        self.redis.rpush(keys.trace(self.run_id), dump(entry))

    def _take_step(self, entry: Entry) -> None:
        exchanges: list[dict[str, Any]] = entry["exchanges"]
        self.answers.left = deque(
            self._answer(entry, exchange, last=exchange is exchanges[-1]) for exchange in exchanges
        )
        self.loop.default_model = exchanges[0]["request"]["model"] if exchanges else ""
        self.loop.out_of_time = any(each.get("out_of_time") for each in exchanges)
        self._say_before(exchanges)
        try:
            self.loop.advance(self.run_id, entry["step"])
        except NothingRecorded:
            if entry.get("released"):
                self._release(entry)
                return
            asked = len(exchanges)
            raise self._another_way(entry, "exchanges", asked, asked + 1) from None
        # The wait is over before anybody looks.
        self.redis.hset(keys.run(self.run_id), "not_before", 0)

    def _release(self, entry: Entry) -> None:
        """Let go of a step as a process did that stopped, after what it had asked."""
        usage = Usage()
        for exchange in entry["exchanges"]:
            usage += Usage.model_validate(exchange["usage"])
        self.store.release_step(self._record(), usage=usage, trace=dict(entry))

    def _say_before(self, exchanges: Sequence[Entry]) -> None:
        """Send what the user had said by the time that this step began."""
        if not exchanges:
            return
        start = exchanges[0]["request"]["history"]
        unread = int(self.redis.llen(keys.inbox(self.run_id)))
        self._say(self.recording.messages[self._length() + unread : start])
        if start > self._length() and self._record().final is not None:
            # A tool's answer, after which the run went on: it is told before the step begins.
            self.loop.advance(self.run_id, self._record().step)

    def _say_behind(self, at: int) -> bool:
        """Send what the user said while the answer that stands `at` this place was made, if any."""
        messages = self.recording.messages[at : at + 1]
        if not messages or messages[0]["role"] != "assistant" or messages[0].get("tool_calls"):
            return False
        behind = self.recording.messages[at + 1 :]
        said = tuple(itertools.takewhile(lambda each: each["role"] == "user", behind))
        self._say(said)
        return bool(said)

    def _say_last(self) -> None:
        """Send what the user had said, and no step had read, when the run ended."""
        said = self._left_unread()
        self._say(said[int(self.redis.llen(keys.inbox(self.run_id))) :])

    def _left_unread(self) -> tuple[Entry, ...]:
        """What the user had said behind the last block, if anything."""
        left = self.recording.messages[self._length() :]
        behind = itertools.dropwhile(
            lambda each: each["role"] == "tool" or isinstance(each["content"], list), left
        )
        return tuple(itertools.takewhile(lambda each: each["role"] == "user", behind))

    def _say(self, messages: Sequence[Entry]) -> None:
        for message in messages:
            if message["role"] == "user":
                self.redis.rpush(keys.inbox(self.run_id), dump(message))

    def _answer(
        self, entry: Entry, exchange: Entry, *, last: bool
    ) -> Callable[[], ModelReply | None]:
        give = self._read_answer(entry, exchange, last=last)
        at = exchange["request"]["history"]
        if not last or "error" in exchange or self._last_of(at) is not exchange:
            return give

        def answer() -> ModelReply | None:
            self._say_behind(at)
            return give()

        return answer

    def _last_of(self, history: int) -> Entry | None:
        """The last exchange that was sent a history of this length."""
        found = [
            each for _, each in self.recording.exchanges() if each["request"]["history"] == history
        ]
        return found[-1] if found else None

    def _read_answer(
        self, entry: Entry, exchange: Entry, *, last: bool
    ) -> Callable[[], ModelReply | None]:
        if "hidden" in entry and HIDDEN in dump(exchange) and "error" not in exchange:
            reply = self._answer_in_history(entry, exchange) if last else None
            if reply is not None:
                return lambda: reply
            self._go_blind(entry["step"])
        return lambda: rebuild_reply(exchange)

    def _answer_in_history(self, entry: Entry, exchange: Entry) -> ModelReply | None:
        """The whole of an answer that the trace hides in part, where it went into the history."""
        at = exchange["request"]["history"]
        turn = self.recording.messages[at] if at < len(self.recording.messages) else {}
        if turn.get("role") != "assistant" or (self.recording.hidden and HIDDEN in dump(turn)):
            return None
        made, decisions = turn.get("tool_calls") or [], entry["decisions"]
        if [each["id"] for each in made] != [each["provider_id"] for each in decisions]:
            return None
        try:
            read = rebuild_reply(exchange)
        except ModelError:
            return None
        if isinstance(read, ToolCalls):
            return dataclasses.replace(
                read, calls=tuple(map(_proposed, made, decisions)), text=turn["content"]
            )
        return read and dataclasses.replace(read, text=turn["content"])

    def _bring_result(self, entry: Entry) -> None:
        step, given = entry["step"], entry["result"]
        index = int(given["call_id"].partition(".")[2])
        record = self._record()
        calls = self._calls()
        state = calls.get(f"{index}.state", "")
        if record.phase != "tools" or record.step != step or state not in OPEN_STATES:
            raise self._another_way(entry, "state", "open", state or "closed")
        result = ToolResult.model_validate(self._as_it_was(entry, given, index))
        if "decided" in entry:
            if state != "approval":
                raise self._another_way(entry, "state", "approval", state)
            decided = Decided.model_validate(entry["decided"])
            self.store.record_result(
                self.run_id,
                step,
                index,
                result,
                waits=state,
                decided=decided,
                hidden=frozenset(self.store.settings.redact),
            )
            return
        if state == "asked":
            answer_question(self.store, self.run_id, result.content, result.call_id)
            return
        # It was approved before, and had its turn; who waited for whom is in no trace.
        self.redis.hset(keys.calls(self.run_id), f"{index}.state", "queued")
        self.redis.hdel(keys.calls(self.run_id), f"{index}.limits")
        tool, attempt = self.agent.toolbox.get(result.name), result.attempt
        if entry["kind"] == "result" and tool is not None:
            # Attempts that died left no entry. Of a result that stands nobody knows whether it was
            # the last attempt's, or of one that had to be ended with its process.
            attempt = max(attempt, tool.attempts)
        self.redis.hset(keys.calls(self.run_id), f"{index}.started", max(0, attempt - 1))
        self.loop.results.next = Executed(
            result, fatal=entry.get("fatal", False), images=self._images(entry, result)
        )
        self.loop.call_tool(self.run_id, step, index)
        if entry["kind"] == "retried_result":
            self.redis.hset(keys.calls(self.run_id), f"{index}.not_before", 0)

    def _as_it_was(self, entry: Entry, given: Entry, index: int) -> dict[str, Any]:
        """A result with what the model was shown and what it found, where the trace hides that."""
        if "hidden" not in entry or entry["kind"] != "result":
            return dict(given)
        at = self._length() + index
        messages, evidence = self.recording.messages, self.recording.evidence
        if self.recording.hidden or at >= len(messages) or messages[at]["role"] != "tool":
            self._go_blind(entry["step"])
            return dict(given)
        found = [each for each in evidence if each.call_id == given["call_id"]]
        return {**given, "content": messages[at]["content"], "evidence": found}

    def _images(self, entry: Entry, result: ToolResult) -> tuple[Image, ...]:
        """The images of a result: they follow its block, in the history alone."""
        wanted = entry.get("images", ())
        if not wanted:
            return ()
        said = f"Images returned by call {result.call_id}, as data:"
        shown: list[Any] = []
        for message in self.recording.messages[self._length() :]:
            if message["role"] == "user" and isinstance(message["content"], list):
                texts = [part.get("text") for part in message["content"]]
                if said in texts:
                    shown = message["content"][texts.index(said) + 1 :][: len(wanted)]
                    break
        if [digest(dump(part)) for part in shown] != list(wanted):
            raise self._another_way(entry, "images", len(wanted), len(shown))
        return tuple(_image(part["image_url"]["url"]) for part in shown)

    def _resume(self, entry: Entry) -> None:
        before = entry["before"]
        error = before["error"] and RunError.model_validate(before["error"])
        self._end(StopReason(before["stop_reason"]), error)
        limits = Limits.model_validate(entry["limits"])
        if self.store.resume_run(self._record(), limits) is Outcome.OK:
            self.loop.may_stop = False
            self._put_off_deadline()

    def _end_as_recorded(self) -> None:
        record = self.recording.run
        if record.stop_reason is not None:
            self._end(record.stop_reason, record.error)
            return
        # A step that has begun, and has no answer yet, has read what the user had said.
        for message in self._left_unread():
            self.redis.rpush(keys.messages(self.run_id), dump(message))

    def _end(self, stop_reason: StopReason, error: RunError | None) -> None:
        """End the run as it had ended, unless it has done so by itself."""
        record = self._record()
        if record.stop_reason is not None:
            return
        self.loop.may_stop = True
        self.answers.left.clear()
        if record.final is not None and self._say_behind(self._length()):
            # A tool's answer was no end, and another end came before the next step.
            self.loop.advance(self.run_id, record.step)
            record = self._record()
        self._say_last()
        if stop_reason is StopReason.CANCELLED:
            cancel_run(self.store, self.run_id, error.message if error else "")
        elif stop_reason is StopReason.TIMEOUT:
            self.loop.end(record, Outcome.EXPIRED)
        elif error is not None and error.type == RunErrorType.POISONED:
            self.redis.hset(keys.run(self.run_id), "deaths", MAX_DEATHS)
            self.loop.end(self._record(), Outcome.POISONED)
        elif record.fatal is not None:
            self.loop.end(record, Outcome.FAILED)
        else:
            # A limit, or a tool's answer: the step that would be next sees that there is none.
            with contextlib.suppress(NothingRecorded):
                self.loop.advance(self.run_id, record.step)
        if self._record().stop_reason is None:
            self._missing_result()
            raise _WentAnotherWay(Difference(None, None, "stop_reason", stop_reason, None))

    # --- what came out ---------------------------------------------------------------------------

    def _record(self) -> RunRecord:
        return self.store.read_run(self.run_id)

    def _calls(self) -> dict[str, str]:
        """The fields of the open step's calls."""
        fields: Any = self.redis.hgetall(keys.calls(self.run_id))
        return dict(fields)

    def _length(self) -> int:
        return int(self.redis.llen(keys.messages(self.run_id)))

    def _made(self) -> int:
        return int(self.redis.llen(keys.trace(self.run_id)))

    def _entry(self, at: int) -> dict[str, Any]:
        entry: dict[str, Any] = json.loads(str(self.redis.lindex(keys.trace(self.run_id), at)))
        return entry

    def _another_way(
        self, entry: Entry, field: str, recorded: JsonValue, replayed: JsonValue
    ) -> _WentAnotherWay:
        return _WentAnotherWay(Difference(*_place(entry), field, recorded, replayed))

    def _missing_result(self) -> None:
        """Name the calls that hold the run back, if that is what does."""
        record = self._record()
        if record.phase != "tools":
            return
        calls = self._calls()
        open_calls = [
            keys.call_id(record.step, int(name.partition(".")[0]))
            for name, state in calls.items()
            if name.endswith(".state") and state != "done"
        ]
        if open_calls:
            call = min(open_calls)
            raise _WentAnotherWay(Difference(record.step, call, "result", None, "still open"))

    def _compare_entry(self, entry: Entry, at: int) -> None:
        if self._made() <= at:
            self._missing_result()
            raise self._another_way(entry, "kind", entry["kind"], None)
        made = self._entry(at)
        if (made["kind"], _place(made)) != (entry["kind"], _place(entry)):
            raise self._another_way(
                entry, "kind", entry["kind"], f"{made['kind']} of {_name(made)}"
            )
        if "hidden" in entry and "exchanges" in entry:
            _drop_added_replies(entry, made)
        for path, recorded, replayed in _compare(self._shown(entry), self._shown(made)):
            self._differ(*_place(entry), path, recorded, replayed)

    def _compare_messages(self) -> None:
        recorded = self._shown(list(self.recording.messages))
        replayed = self._shown(self.store.read_messages(self.run_id))
        steps = _steps_of(self.store.read_trace(self.run_id), len(recorded))
        for at, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            found = list(_compare(one, other))
            for path, value, new in found:
                self._differ(steps[at], None, f"messages[{at}]{_tail(path)}", value, new)
            if found:
                break
        if len(recorded) != len(replayed):
            self._differ(None, None, "messages", len(recorded), len(replayed))

    def _compare_end(self) -> None:
        old, new = self.recording.run, self._record()
        for name in ("stop_reason", "limit", "step", "tool_calls", "invalid_calls"):
            if getattr(old, name) != getattr(new, name):
                self._differ(None, None, name, getattr(old, name), getattr(new, name))
        evidence = [each.model_dump(mode="json") for each in self.recording.evidence]
        found = [each.model_dump(mode="json") for each in self.store.read_evidence(self.run_id)]
        pairs = {
            "answer": (old.answer, new.answer),
            "error": tuple(each and each.model_dump() for each in (old.error, new.error)),
            "usage": (old.usage.model_dump(), new.usage.model_dump()),
            "evidence": (evidence, found),
        }
        for name, (one, other) in pairs.items():
            for path, recorded, replayed in _compare(self._shown(one), self._shown(other)):
                self._differ(None, None, f"{name}{_tail(path)}", recorded, replayed)

    def _shown(self, value: Any) -> Any:
        """A value as a recording has it that hides fields everywhere."""
        return redact(value, frozenset(self.recording.hidden))

    def _differ(
        self, step: int | None, call: str | None, field: str, old: JsonValue, new: JsonValue
    ) -> None:
        self.differences.append(Difference(step, call, field, old, new))

    def _is_blind(self, difference: Difference) -> bool:
        """Whether what was hidden may be all that makes the difference."""
        step = difference.step
        return self.blind_from is not None and (step is None or step >= self.blind_from)

    def _go_blind(self, step: int) -> None:
        self.blind_from = step if self.blind_from is None else min(self.blind_from, step)


def _changed_nothing(entry: Entry) -> bool:
    """Whether a result came too late, or is of a worker that lacks the tool."""
    if entry["kind"] == "result":
        return "late" in entry
    lacks_tool: bool = entry["result"]["error"]["type"] == ToolErrorType.UNKNOWN_TOOL
    return lacks_tool


def _limits(given: Any) -> Limits | None:
    return None if given is None else Limits.model_validate(given)


def _step_in(call_id: str | None) -> int:
    return int((call_id or "0").partition(".")[0])


def _proposed(made: Entry, decision: Entry) -> ProposedCall:
    """A call as it was read from an answer: from its turn in the history, and what was decided."""
    error = decision["error"] and ToolErrorInfo.model_validate(decision["error"])
    raw_name, raw_arguments = decision["raw_name"], decision["raw_arguments"]
    unread = raw_name is not None or raw_arguments is not None
    if error is not None and not unread and error.type != ToolErrorType.OUTPUT_TRUNCATED:
        error = None  # the runtime's own refusal, which it makes again
    return ProposedCall(
        provider_id=made["id"],
        name=made["function"]["name"],
        arguments=made["function"]["arguments"],
        error=error,
        raw_name=raw_name,
        raw_arguments=raw_arguments,
    )


def _image(url: str) -> Image:
    head, _, data = url.partition(";base64,")
    return Image(base64.b64decode(data), head.removeprefix("data:"))


def _place(entry: Entry) -> tuple[int, str | None]:
    result = entry.get("result")
    return entry["step"], result["call_id"] if result else None


def _name(entry: Entry) -> str:
    step, call = _place(entry)
    return f"step {step}" if call is None else f"call {call}"


def _steps_of(trace: Sequence[Entry], count: int) -> list[int]:
    """For each message of the history the step that it stands in."""
    steps = [0] * count
    for entry in trace:
        if entry["kind"] == "model" and entry["exchanges"]:
            start = entry["exchanges"][0]["request"]["history"]
            steps[start:] = [entry["step"]] * len(steps[start:])
    return steps


def _drop_added_replies(entry: Entry, made: Entry) -> None:
    """Leave out the replies that a replay tells of since its responses have gaps where it reads."""
    for recorded, replayed in zip(entry["exchanges"], made["exchanges"], strict=False):
        if "reply" not in recorded:
            replayed.pop("reply", None)


def _tail(path: str) -> str:
    return path if not path or path.startswith("[") else f".{path}"


def _compare(
    recorded: Any, replayed: Any, path: str = ""
) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    """The places at which two JSON values differ, with what stands there."""
    match recorded, replayed:
        case dict(), dict():
            for key in dict.fromkeys((*recorded, *replayed)):
                if key not in VOLATILE:
                    inner = f"{path}.{key}" if path else str(key)
                    yield from _compare(recorded.get(key), replayed.get(key), inner)
        case (list() | tuple(), list() | tuple()) if len(recorded) == len(replayed):
            for at, (one, other) in enumerate(zip(recorded, replayed, strict=True)):
                yield from _compare(one, other, f"{path}[{at}]")
        case _:
            if recorded != replayed:
                yield path, recorded, replayed
