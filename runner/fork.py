"""Begins a new run from a step of another: what came before it is kept, and nothing after it."""

from __future__ import annotations

from typing import Any

from runner.errors import InvalidInput
from runner.models import Evidence, Limits, StopReason
from runner.recording import Recording
from runner.store import Outcome, RunStore


def fork_run(
    store: RunStore, recording: Recording, *, step: int, run_id: str, agent: str, limits: Limits
) -> Outcome:
    """Write the record of a run that begins where `step` of the recorded one began.

    `limits` count from there: so many more steps, and a deadline of its own. Raises `InvalidInput`
    where the recorded run has no such step; then nothing was written.
    """
    record = recording.run
    start = find_start(recording, step)
    return store.fork_run(
        run_id=run_id,
        source=recording.run_id,
        agent=agent,
        step=step,
        messages=recording.messages[:start],
        evidence=[each for each in recording.evidence if _step_of(each) < step],
        trace={
            "kind": "forked",
            "step": step,
            "run": recording.run_id,
            "messages": start,
            "results": [each for each in _results(recording) if _step_in(each["call_id"]) < step],
        },
        limits=limits.model_copy(update={"max_steps": step + limits.max_steps}),
        principal=record.principal,
        metadata=record.metadata | {"forked_from": {"run": recording.run_id, "step": step}},
        goal=record.goal,
    )


def find_start(recording: Recording, step: int) -> int:
    """How many messages the history had when `step` began; `InvalidInput` where it never did."""
    starts = find_starts(recording)
    if step not in starts:
        known = ", ".join(map(str, starts)) or "none yet"
        raise InvalidInput(
            f"run {recording.run_id} can't be forked at step {step}; it can be at: {known}"
        )
    return starts[step]


def find_starts(recording: Recording) -> dict[int, int]:
    """Step -> how many messages the history had when it began, of all steps that have begun."""
    starts: dict[int, int] = {}
    for step, exchange in recording.exchanges():
        starts.setdefault(step, exchange["request"]["history"])
    if _is_between_steps(recording):
        # It was to begin next: nobody has asked the model yet.
        starts.setdefault(recording.run.step, len(recording.messages))
    return starts


def _is_between_steps(recording: Recording) -> bool:
    """Whether the history ends where a step would begin: behind a block, or behind the goal."""
    record = recording.run
    if record.phase == "tools" or record.stop_reason is StopReason.COMPLETED:
        return False
    sent = [exchange["request"]["history"] for _, exchange in recording.exchanges()]
    return not sent or sent[-1] < len(recording.messages)


def _results(recording: Recording) -> list[dict[str, Any]]:
    """The first result of each call of the trace, in order; later ones came too late to count."""
    found: dict[str, dict[str, Any]] = {}
    for entry in recording.trace:
        match entry["kind"]:
            case "forked":
                made = entry["results"]
            case "result" if not entry.get("late"):
                made = [entry["result"]]
            case _:
                made = []
        for each in made:
            found.setdefault(each["call_id"], each)
    return list(found.values())


def _step_of(evidence: Evidence) -> int:
    return _step_in(evidence.call_id or "0.0")


def _step_in(call_id: str) -> int:
    return int(call_id.partition(".")[0])
