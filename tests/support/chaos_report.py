"""What the chaos did, held against what must never be: over the records and over the ledger."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conftest import check_keys
from runner import StopReason, keys
from runner.invariants import check_run
from runner.store import RunStore
from support.chaos import CANCEL_GRACE, GUARDED_EVERY, TOOLS, Asked, Hurt, Story
from support.chaos_agents import FETCHES

MAX_EXTRA_MODEL, MAX_EXTRA_TOOLS = 0.10, 0.03
"""Share of repetitions that no killed, frozen, stopped or cut-off holder explains."""


@dataclass(frozen=True)
class Begun:
    """One start of a tool, as the tool itself wrote it down."""

    tool: str
    key: str
    attempt: int
    pid: int
    at: float


@dataclass
class Verdict:
    """Broken rules as sentences (none, if all is well), and the figures to print."""

    faults: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def table(self) -> str:
        width = max(map(len, self.figures))
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in self.figures.items())


def judge(story: Story, store: RunStore, ledger: Sequence[str]) -> Verdict:
    verdict = Verdict()
    begun = [_parse(line) for line in ledger if '"begin"' in line]
    starts: dict[str, list[Begun]] = defaultdict(list)
    for each in begun:
        starts[each.key].append(each)
    _count_strikes(story, verdict)
    _judge_ends(story, store, verdict)
    _judge_records(story, store, verdict)
    _judge_starts(story, starts, verdict)
    _judge_told(story, store, starts, verdict)
    _judge_cancels(story, begun, verdict)
    _judge_limit(story, ledger, verdict)
    _judge_decided(story, starts, verdict)
    _judge_talk(story, store, verdict)
    _judge_what_is_left(story, store, verdict)
    _count_model_calls(story, verdict)
    _count_starts(story, starts, verdict)
    return verdict


def _parse(line: str) -> Begun:
    entry = json.loads(line)
    return Begun(**{name: entry[name] for name in ("tool", "key", "attempt", "pid", "at")})


def _count_strikes(story: Story, verdict: Verdict) -> None:
    counts, size = story.counts, story.size
    verdict.figures |= {
        "seed": story.seed,
        "seconds": round(story.seconds, 1),
        "workers killed": counts["kill"],
        "tool children killed": counts["kill_child"],
        "Redis killed": counts["kill_redis"],
        "messages destroyed": counts["destroy"],
        "messages doubled": counts["double"],
        "workers frozen past their lease": counts["freeze"],
        "workers stopped": counts["stop"],
        "times cut off from Redis": counts["cut_off"],
        "seconds for which Redis was full": counts["fill"] * story.size.full_for,
        "replies to scripts lost": counts["lost_reply"],
        "pub/sub cut, black-holed": f"{counts['cut_pubsub']}, {counts['deafen']}",
        "all connections cut": counts["cut_clients"],
        "workers that ended by themselves": ", ".join(story.exits) or 0,
        "workers that wouldn't stop": counts["wouldn't stop"],
    }
    wanted = {
        "kill": size.worker_kills,
        "kill_redis": size.redis_kills,
        "destroy": size.messages,
        "double": size.doubled,
        "freeze": size.freezes,
        "fill": size.floods,
        "cut_pubsub": size.pubsub_kills,
        "lost_reply": size.lost_replies // 2,
    }
    for what, count in wanted.items():
        if counts[what] < count:
            verdict.faults.append(f"the chaos itself fell short: {what} {counts[what]} of {count}")


def _judge_ends(story: Story, store: RunStore, verdict: Verdict) -> None:
    faults = verdict.faults
    faults += [f"run {run_id} never ended" for run_id in story.unfinished]
    faults += [f"the model was sent an invalid request: {each}" for each in story.violations]
    ends: Counter[str] = Counter()
    times = []
    for number, run in story.runs.items():
        record = store.read_run(run.id)
        reason = record.stop_reason
        ends[reason or "unfinished"] += 1
        wanted = StopReason.CANCELLED if number in story.cancelled else StopReason.COMPLETED
        if reason is not None and reason is not wanted:
            faults.append(f"run {run.id} ended {reason}, not {wanted}: {record.error}")
        if record.ended:
            times.append(record.ended / 1000 - story.submitted[number])
    if len(story.runs) != story.size.runs:
        faults.append(f"{len(story.runs)} of {story.size.runs} runs were accepted")
    times.sort()
    verdict.figures["runs"] = ", ".join(f"{count} {end}" for end, count in ends.items())
    verdict.figures["from submit to end"] = (
        f"p50 {times[len(times) // 2]:.1f} s, p99 {times[int(0.99 * (len(times) - 1))]:.1f} s, "
        f"max {times[-1]:.1f} s"
    )


def _judge_records(story: Story, store: RunStore, verdict: Verdict) -> None:
    broken, unordered = 0, 0
    for run in story.runs.values():
        found = check_run(store, run.id)
        broken += bool(found)
        verdict.faults += [f"run {run.id}: {fault}" for fault in found]
        own = store.read_messages(run.id)[store.read_run(run.id).goal :]
        out_of_order = _misplaced(run.id, own)
        unordered += len(out_of_order)
        verdict.faults += out_of_order
    verdict.figures["runs whose record breaks a rule"] = broken
    verdict.figures["results out of order"] = unordered


def _misplaced(run_id: str, messages: list[dict[str, Any]]) -> list[str]:
    """Results that aren't those of their place: each names its call, unless it is an error."""
    results = [each["content"] for each in messages if each["role"] == "tool"]
    found = []
    for at, content in enumerate(results):
        step, index = divmod(at, len(TOOLS))
        wanted = f"{TOOLS[index]} {run_id}.{step}.{index}"
        if content != wanted and not content.startswith('{"ok":false'):
            found.append(f"run {run_id}: the result of call {step}.{index} is {content!r}")
    return found


def _judge_starts(story: Story, starts: dict[str, list[Begun]], verdict: Verdict) -> None:
    twice = [key for key, each in starts.items() if each[0].tool == "charge" and len(each) > 1]
    verdict.faults += [f"charge was started {len(starts[key])} times: {key}" for key in twice]
    verdict.figures["non-idempotent tools started twice"] = len(twice)
    for key, each in starts.items():
        for earlier, later in _pairs(sorted(each, key=lambda start: (start.attempt, start.at))):
            # A graceful stop costs no attempt, so what it hands over begins under the same number.
            stopped = any(hurt.what == "stop" for hurt in _hurts_of(story, earlier, later.at))
            if later.attempt == earlier.attempt and not stopped:
                verdict.faults.append(f"{key} was started twice as attempt {later.attempt}")


def _judge_told(
    story: Story, store: RunStore, starts: dict[str, list[Begun]], verdict: Verdict
) -> None:
    """Every start in the ledger was granted by the record, before the run's end."""
    for run in story.runs.values():
        granted = {
            (f"{run.id}.{event.call}", event.data["attempt"])
            for event in store.read_events(run.id, "0")
            if event.type == "call.started"
        }
        mine = [each for key, found in starts.items() if key.startswith(run.id) for each in found]
        verdict.faults += [
            f"{each.key} ran as attempt {each.attempt}, which the record never granted"
            for each in mine
            if (each.key, each.attempt) not in granted
        ]


def _judge_cancels(story: Story, begun: Sequence[Begun], verdict: Verdict) -> None:
    ends = {story.runs[number].id: at for number, at in story.cancelled.items()}
    late = 0
    for each in begun:
        at = ends.get(each.key.split(".")[0])
        if at is None or each.at <= at + CANCEL_GRACE:
            continue
        # A process that was frozen between its grant and its first line writes it when it thaws.
        if not _overlap(story, at, each.at, pids={each.pid}):
            late += 1
            verdict.faults.append(f"{each.key} began {each.at - at:.1f} s after its run's cancel")
    for asked in story.asked:
        at = story.cancelled.get(asked.run)
        if at is None or asked.at <= at + CANCEL_GRACE:
            continue
        if not _overlap(story, at, asked.at, workers={asked.worker}):
            late += 1
            verdict.faults.append(
                f"the model was asked {asked.at - at:.1f} s after the cancel of run {asked.run}"
            )
    verdict.figures["begun after a cancel"] = late


def _judge_limit(story: Story, ledger: Sequence[str], verdict: Verdict) -> None:
    """How many fetched at once. Left out: whoever died in it, or was kept from its lease."""
    ends = {story.runs[number].id: at for number, at in story.cancelled.items()}
    begun: dict[tuple[str, int], Begun] = {}
    edges: list[tuple[float, int]] = []
    for line in ledger:
        each = _parse(line)
        if each.tool != "fetch":
            continue
        if '"begin"' in line:
            begun[each.key, each.pid] = each
        elif (first := begun.pop((each.key, each.pid), None)) is not None:
            # The place of a call ends with its run; the tool has a moment more.
            until = min(each.at, ends.get(each.key.split(".")[0], each.at))
            if until > first.at and not _hurts_of(story, first, each.at):
                edges += [(first.at, 1), (until, -1)]
    most = max(itertools.accumulate(change for _, change in sorted(edges)), default=0)
    verdict.figures["fetches at once, of at most"] = f"{most}, {FETCHES}"
    if most > FETCHES:
        verdict.faults.append(f"{most} fetched at once; the limit is {FETCHES}")


def _judge_decided(story: Story, starts: dict[str, list[Begun]], verdict: Verdict) -> None:
    """What needed an approval was run after one, and never after a denial."""
    guarded = {run.id for number, run in story.runs.items() if number % GUARDED_EVERY == 0}
    for key, found in starts.items():
        run_id, step, _ = key.split(".")
        if found[0].tool != "charge" or run_id not in guarded or step != "1":
            continue
        approved, at = story.decided.get(key, (False, 0.0))
        if not approved or found[0].at < at:
            verdict.faults.append(f"{key} was charged without an approval")
    approvals = sum(approved for approved, _ in story.decided.values())
    verdict.figures["approved, denied"] = f"{approvals}, {len(story.decided) - approvals}"


def _judge_talk(story: Story, store: RunStore, verdict: Verdict) -> None:
    """What was said stands in the history once; and in front of it what the run goes on from."""
    for number, texts in story.said.items():
        found = Counter(str(each["content"]) for each in store.read_messages(story.runs[number].id))
        for text in texts:
            if found[text] != 1:
                verdict.faults.append(f"run {number} has {text!r} {found[text]} times")
    for number, previous in story.follows.items():
        after, ended = (store.read_run(story.runs[n].id) for n in (number, previous))
        if after.after != ended.run_id and number in story.cancelled:
            continue  # before it had its turn
        before = store.read_messages(ended.run_id)
        if store.read_messages(after.run_id)[: len(before)] != before:
            verdict.faults.append(f"run {number} doesn't go on from the history of {previous}")
    verdict.figures["messages said"] = sum(map(len, story.said.values()))
    verdict.figures["runs that go on from another"] = len(story.follows)


def _judge_what_is_left(story: Story, store: RunStore, verdict: Verdict) -> None:
    """When every run has ended: no place is held or waited for, and no key stays for ever."""
    raw: Any = store.redis
    try:
        check_keys(raw)
    except AssertionError as error:
        verdict.faults.append(f"keys that are left: {error}")
    if story.unfinished:
        return
    now = int(raw.time()[0]) * 1000
    for name in raw.scan_iter(keys.slots("*")):
        if held := raw.zrangebyscore(name, now, "+inf"):
            verdict.faults.append(f"{name} is held by {held}, and nobody runs")
    for name in raw.scan_iter(keys.waiting("*")):
        verdict.faults.append(f"{raw.zrange(name, 0, -1)} wait in {name}, and nobody runs")


def _count_model_calls(story: Story, verdict: Verdict) -> None:
    turns: dict[tuple[int, int], list[Asked]] = defaultdict(list)
    for each in story.asked:
        turns[each.run, each.turn].append(each)
    extra = [pair for each in turns.values() for pair in _pairs(each)]
    unexplained = [
        (first, again)
        for first, again in extra
        if not _overlap(story, first.at, again.at, workers={first.worker})
    ]
    verdict.figures["model calls needed"] = len(turns)
    share = _say_extra(verdict, "extra model calls", len(extra), len(unexplained), len(turns))
    if share > MAX_EXTRA_MODEL:
        verdict.faults.append(f"{share:.1%} of the model calls were repeated for no kill")


def _count_starts(story: Story, starts: dict[str, list[Begun]], verdict: Verdict) -> None:
    safe = [each for each in starts.values() if each[0].tool != "charge"]
    extra = [pair for each in safe for pair in _pairs(sorted(each, key=lambda start: start.at))]
    unexplained = [pair for pair in extra if not _hurts_of(story, pair[0], pair[1].at)]
    verdict.figures["idempotent starts needed"] = len(safe)
    verdict.figures["non-idempotent starts"] = len(starts) - len(safe)
    share = _say_extra(verdict, "extra idempotent starts", len(extra), len(unexplained), len(safe))
    if share > MAX_EXTRA_TOOLS:
        verdict.faults.append(f"{share:.1%} of the idempotent tools were started again for no kill")


def _say_extra(verdict: Verdict, what: str, extra: int, unexplained: int, needed: int) -> float:
    share = unexplained / max(needed, 1)
    verdict.figures[what] = (
        f"{extra} ({extra / max(needed, 1):.1%}), for no killed holder {unexplained} ({share:.1%})"
    )
    return share


def _hurts_of(story: Story, begun: Begun, until: float) -> list[Hurt]:
    return _overlap(story, begun.at, until, pids={begun.pid})


def _overlap(
    story: Story,
    begin: float,
    end: float,
    *,
    pids: Iterable[int] = (),
    workers: Iterable[str] = (),
) -> list[Hurt]:
    """What kept one of these from its work at some time between `begin` and `end`."""
    return [
        hurt
        for hurt in story.hurts
        if hurt.begin <= end
        and begin <= hurt.end
        and (hurt.pids.intersection(pids) or hurt.workers.intersection(workers))
    ]


def _pairs(items: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(itertools.pairwise(items))
