"""Each Lua script does what its header says, and the store calls it as its header asks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import fakeredis
import pytest

from runner.models import (
    Decided,
    Evidence,
    Limits,
    StopReason,
    ToolDecision,
    ToolErrorInfo,
    ToolResult,
    Usage,
)
from runner.scripts import FOLDER, Envelope, Envelopes, ScriptText, load_script, script_names
from runner.settings import Settings
from runner.store import BegunCall, BegunStep, Lost, OpenCall, Outcome, RunStore
from runner.tools import error_result

NAMES = script_names()
SCRIPTS = [load_script(name) for name in NAMES]

PRELUDE = (FOLDER / "prelude.lua").read_text(encoding="utf-8")
PARAGRAPHS = PRELUDE.strip().split("\n\n")
DEFINED = r"(?m)^local (?:function )?(\w+)"

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)


def code_of(script: ScriptText) -> str:
    """The body without comments: what really runs."""
    return re.sub(r"--.*", "", script.body)


def words_of(script: ScriptText) -> set[str]:
    """The words that a script may return, with those of `refuse` and of what it hands on."""
    code = code_of(script)
    shared = {"STALE", "CANCELLED"} if "return refused" in code else set()
    handed_on = re.findall(r"local reply = (\w+)\(", code) if "return reply\n" in code else []
    return words_in(code) | shared.union(*(words_of(load_script(name)) for name in handed_on))


KEY = r"(?m)^-- KEYS\[(\d+)"
ARG = r"(?m)^-- ARGV\[(\d+)"


def numbers_in(pattern: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(pattern, text)]


def words_in(code: str) -> set[str]:
    """The words that a script may return: its literals, but those for Redis or to compare with."""
    code = re.sub(r"[=~]= '[A-Z]+'", "", code)
    calls = re.compile(r"redis\.call\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)")
    return set(re.findall(r"'([A-Z]+)'", calls.sub("", code)))


@each_script
def test_header_starts_with_the_name_and_a_purpose(script: ScriptText) -> None:
    assert re.match(rf"-- {script.name}: \w.{{20,}}\n", script.body)


@each_script
def test_declared_keys_and_arguments_are_numbered_without_holes(script: ScriptText) -> None:
    for numbers in (numbers_in(KEY, script.body), numbers_in(ARG, script.body)):
        assert numbers == list(range(1, len(numbers) + 1))


@each_script
def test_the_loader_reads_every_line_of_a_header(script: ScriptText) -> None:
    assert len(script.keys) == len(numbers_in(KEY, script.body))
    assert len(script.args) == len(numbers_in(ARG, script.body))
    assert len(set(script.keys)) == len(script.keys)
    assert len(set(script.args)) == len(script.args)


@each_script
def test_only_the_last_argument_may_be_open_ended(script: ScriptText) -> None:
    open_ended = numbers_in(r"(?m)^-- ARGV\[(\d+)\.\.\]", script.body)
    assert open_ended in ([], numbers_in(ARG, script.body)[-1:])
    assert script.open_ended is bool(open_ended)


@each_script
def test_every_key_that_is_used_is_declared_and_the_other_way_round(script: ScriptText) -> None:
    code = code_of(script)
    used = set(numbers_in(r"KEYS\[(\d+)\]", code))
    for last in re.findall(r"for i = 1, (\d+) do\s+redis\.call\('\w+', KEYS\[i\]", code):
        used |= set(range(1, int(last) + 1))
    used |= set(numbers_in(r"unpack\(KEYS, (\d+)\)", code))
    assert used == set(range(1, len(script.keys) + 1))


@each_script
def test_every_argument_that_is_used_is_declared_and_the_other_way_round(
    script: ScriptText,
) -> None:
    code = code_of(script)
    declared = len(numbers_in(ARG, script.body))
    fixed = declared - script.open_ended
    used = set(numbers_in(r"ARGV\[(\d+)\]", code))
    assert {number for number in used if number <= fixed} == set(range(1, fixed + 1))
    assert used <= set(range(1, declared + 1))
    reads_on = re.search(r"ARGV\[[a-z]|unpack\(ARGV", code) is not None
    assert reads_on is script.open_ended


@each_script
def test_a_script_returns_the_words_that_it_declares_and_no_others(script: ScriptText) -> None:
    assert words_of(script) == set(script.words)


def test_the_prelude_refuses_with_the_words_that_are_counted_for_it() -> None:
    assert words_in(re.sub(r"--.*", "", PRELUDE)) == {"STALE", "CANCELLED"}


def test_the_scripts_and_the_outcomes_have_the_same_words() -> None:
    assert {word for script in SCRIPTS for word in script.words} == set(Outcome)


@each_script
def test_a_script_touches_no_key_that_is_not_handed_in(script: ScriptText) -> None:
    assert "celeriac" not in script.body


@each_script
def test_a_script_never_parses_json(script: ScriptText) -> None:
    assert "cjson" not in code_of(script)


def test_the_prelude_is_made_of_paragraphs_that_define_something() -> None:
    assert "prelude" not in NAMES
    for paragraph in PARAGRAPHS:
        assert re.findall(DEFINED, paragraph), paragraph


@each_script
def test_a_script_has_of_the_prelude_what_it_uses_and_no_more(script: ScriptText) -> None:
    code = "".join([*(each.as_function for each in script.uses), script.body])
    paragraphs = [*filter(None, script.text.removesuffix(code).strip().split("\n\n"))]
    assert paragraphs == [each for each in PARAGRAPHS if each in paragraphs]
    words = [re.findall(r"\w+", re.sub(r"--.*", "", each)) for each in [*paragraphs, code]]
    for paragraph in PARAGRAPHS:
        names = set(re.findall(DEFINED, paragraph))
        at = paragraphs.index(paragraph) + 1 if paragraph in paragraphs else 0
        used = any(not names.isdisjoint(each) for each in words[at:])
        assert used is (paragraph in paragraphs), names


def test_a_script_has_those_that_it_uses_as_functions_of_their_names() -> None:
    script = load_script("take_call")
    assert [each.name for each in script.uses] == ["record_result", "begin_call"]
    for used in script.uses:
        assert f"local function {used.name}(KEYS, ARGV)\n{used.body}\nend\n" in script.text
    assert load_script("begin_call").uses == ()


# --- the store's side --------------------------------------------------------------------------

Sent = tuple[str, int, int]

HINTS = Envelopes(Envelope("steps", "step", "{}"), Envelope("calls", "call", "{}"))


class Recorder(RunStore):
    """A store that notes what it sends."""

    def __init__(self) -> None:
        super().__init__(Settings(), fakeredis.FakeRedis(decode_responses=True))
        self.sent: list[Sent] = []

    def _run(self, name: str, key_names: Sequence[str], args: Sequence[Any]) -> list[Any]:
        self.sent.append((name, len(key_names), len(args)))
        return super()._run(name, key_names, args)


def opened(index: int, result: ToolResult | None = None) -> OpenCall:
    decision = ToolDecision(call_id=f"0.{index}", name="ping", arguments="{}")
    return OpenCall(f"c{index}", decision, starts=1, result=result)


def walk() -> dict[str, list[Sent]]:
    """One call of each method of the store that is named like a script; what each has sent."""
    store = Recorder()
    run = "run-of-scripts"
    refusal = error_result("0.1", "ping", ToolErrorInfo(type="DENIED", message="no"))
    ok = ToolResult(call_id="0.0", name="ping", ok=True, content="pong")

    def begin_step() -> BegunStep:
        begun = store.begin_step(run, 0)
        assert isinstance(begun, BegunStep)
        return begun

    def begin_call() -> BegunCall:
        begun = store.begin_call(run, 0, 0)
        assert isinstance(begun, BegunCall)
        return begun

    def sent_by(act: Callable[[], Any]) -> list[Sent]:
        before = len(store.sent)
        act()
        return store.sent[before:]

    walked: dict[str, list[Sent]] = {}
    walked["create_run"] = sent_by(
        lambda: store.create_run(run_id=run, agent="a", messages=[{"role": "user"}, {"role": "x"}])
    )
    walked["fork_run"] = sent_by(
        lambda: store.fork_run(
            run_id="a-fork-of-it",
            agent="a",
            step=1,
            messages=[{"role": "user"}, {"role": "x"}],
            evidence=[Evidence(source="s")],
            trace={},
            limits=Limits(),
            principal=None,
            metadata={},
        )
    )
    walked["adopt_limits"] = sent_by(lambda: store.adopt_limits(run, Limits()))
    record = begin_step().record
    walked["begin_step"] = store.sent[-1:]
    walked["renew_step"] = sent_by(lambda: store.renew_step(run, record.epoch))
    walked["keep_view"] = sent_by(lambda: store.keep_view(record, {}))
    spent: dict[str, Any] = {"usage": Usage(), "trace": {}, "event": {}}
    walked["admit_step"] = sent_by(
        lambda: store.admit_step(record, endpoint="e", limits={"m": "1"}, tokens_per_minute=1)
    )
    walked["grant_slots"] = sent_by(store.grant_slots)
    walked["commit_step"] = sent_by(
        lambda: store.commit_step(
            record,
            messages=[{}, {}],
            calls=[opened(0), opened(1, refusal)],
            parallel=1,
            invalid=0,
            fingerprint="f",
            **spent,
        )
    )
    walked["park_step"] = sent_by(lambda: store.park_step(record, delay=1, **spent))
    walked["release_step"] = sent_by(lambda: store.release_step(record))
    call = begin_call()
    walked["begin_call"] = store.sent[-1:]
    walked["renew_call"] = sent_by(lambda: store.renew_call(call))
    walked["retry_call"] = sent_by(lambda: store.retry_call(call, delay=0, result=ok))
    walked["decide_call"] = sent_by(
        lambda: store.decide_call(run, 0, 0, Decided(approved=True), digest="d")
    )
    walked["add_event"] = sent_by(lambda: store.add_event(run, "x", step=None, call=None, data={}))
    walked["recover_run"] = sent_by(lambda: store.recover_run(run))
    walked["claim_due"] = sent_by(store.claim_due)
    walked["sweep_runs"] = sent_by(store.sweep_runs)
    walked["lose_call"] = sent_by(lambda: store.lose_call(run, 0, 0, pid=1, stopped=False))
    store.envelopes = lambda: HINTS
    walked["take_call"] = sent_by(lambda: store.take_call(run, 0, 1, ok, operation="op"))
    walked["take_step"] = sent_by(
        lambda: store.take_step(
            record,
            messages=[{}],
            calls=[opened(0)],
            parallel=1,
            invalid=0,
            fingerprint="f",
            **spent,
        )
    )
    store.envelopes = lambda: None
    walked["record_result"] = sent_by(lambda: store.record_result(run, 0, 0, ok, fatal=None))
    walked["end_run"] = sent_by(
        lambda: store.end_run(run, StopReason.CANCELLED, closer="closed", limit="timeout")
    )
    assert store.recover_run(run) == Lost(Outcome.STALE)
    walked["send_message"] = sent_by(lambda: store.send_message(run, "op", "hello"))
    walked["settle_run"] = sent_by(lambda: store.settle_run(store.read_run(run)))
    walked["resume_run"] = sent_by(lambda: store.resume_run(store.read_run(run), Limits()))
    walked["delete_run"] = sent_by(lambda: store.delete_run(run))
    return walked


@each_script
def test_the_store_method_of_the_same_name_sends_what_the_header_declares(
    script: ScriptText,
) -> None:
    assert callable(getattr(RunStore, script.name, None))
    walked = walk()
    assert script.name in walked, f"walk() sends no {script.name} yet: add a line to it"
    [(name, keys, args)] = walked[script.name]
    assert name == script.name
    open_keys = re.search(r"(?m)^-- KEYS\[\d+\.\.\]", script.body) is not None
    assert keys >= len(script.keys) if open_keys else keys == len(script.keys)
    declared = len(numbers_in(ARG, script.body))
    assert args >= declared if script.open_ended else args == declared


def test_a_commit_sends_ten_arguments_for_each_call() -> None:
    fixed = len(numbers_in(ARG, load_script("commit_step").body)) - 1
    [(_, _, args)] = walk()["commit_step"]
    assert args == fixed + 2 + 2 * 10
