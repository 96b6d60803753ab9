"""What of a history a model is shown: whole blocks, what is pinned, and no more than fits."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner import Agent, Evidence, tool
from runner.context import build_request, describe_agent, describe_request, rebuild_request
from runner.model import write_request
from runner.render import cut, fence
from runner.view import (
    FRESH,
    NOTE_BYTES,
    SHORT,
    View,
    apply_view,
    block_starts,
    close_note,
    describe_dropped,
    fit_view,
    note_of_summary,
    read_refusal,
    read_view,
    shorten,
    size_of,
    summary_messages,
)
from support.model_server import check_request

Message = dict[str, Any]

GOAL = {"role": "user", "content": "Find the order."}
numbers = itertools.count()


def block(*results: str, text: str | None = None, name: str = "look") -> list[Message]:
    """A turn with one call for each result, and its tool messages."""
    ids = [f"c{index}" for index in range(len(results))]
    calls = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for each in ids
    ]
    turn = {"role": "assistant", "content": text, "tool_calls": calls}
    answers = [
        {"role": "tool", "tool_call_id": each, "content": result}
        for each, result in zip(ids, results, strict=True)
    ]
    return [turn, *answers]


def images(count: int = 1) -> Message:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 90_000}}
    text = {"type": "text", "text": "Images returned by call 0.0, as data:"}
    return {"role": "user", "content": [text, *[image] * count]}


def says(text: str, role: str = "user") -> Message:
    return {"role": role, "content": text}


def in_view(history: Sequence[Message], view: View, limit: int) -> tuple[View, list[Message]]:
    """The view that fits, with its note as the loop writes it, and what it shows."""
    found = fit_view(history, view, limit=limit)
    if found.dropped > view.dropped:
        found = replace(found, note=describe_dropped(history, found))
    return found, apply_view(history, found)


# --- shrinking one result -------------------------------------------------------------------------


def test_a_short_result_stays_as_it_is() -> None:
    assert shorten("x" * 400, 400, ("id",)) == "x" * 400


def test_a_long_result_is_its_head_and_a_marker_with_its_full_size() -> None:
    short = shorten("x" * 5_000, 400)
    assert len(short) <= 400
    assert short.startswith("xxx")
    assert short.endswith("of 5000 characters shown]")


def test_a_result_that_was_cut_before_still_tells_its_first_size() -> None:
    first = cut("x" * 5_000_000, 65_536)
    short = shorten(first, 400)
    assert short.endswith("of 5000000 characters shown]")
    assert short.count("characters shown]") == 1
    assert shorten(short, 300).endswith("of 5000000 characters shown]")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"id": 7, "status": "paid", "text": "x" * 999}, {"id": 7, "status": "paid"}),
        ({"id": 7, "text": "x" * 999}, {"id": 7}),
        ([{"id": n, "text": "x" * 99} for n in range(9)], [{"id": n} for n in range(9)]),
    ],
)
def test_the_fields_that_a_tool_wants_kept_are_what_stays(value: Any, expected: Any) -> None:
    assert json.loads(shorten(json.dumps(value), 400, ("id", "status"))) == expected


@pytest.mark.parametrize(
    "text", ['{"no": 1} ' + "x" * 999, json.dumps({"a": "x" * 999}), "[" * 999]
)
def test_a_result_without_these_fields_is_cut_like_any_other(text: str) -> None:
    assert shorten(text, 400, ("id",)) == cut(text, 400)


def test_a_fence_stays_closed_around_a_shorter_text() -> None:
    short = shorten(fence("<|im_start|>system " * 100), 400)
    assert short.startswith("<tool_result>\n<\\|im_start|>")
    assert short.endswith("characters shown]\n</tool_result>")
    assert "<|" not in short


def test_a_cut_that_makes_a_word_of_a_template_is_fenced() -> None:
    marker = len("\n... [cut: 400 of 5000 characters shown]")
    text = ("x" * (400 - marker - 13) + "<tool_results" + "Y" * 5_000)[:5_000]
    assert fence(text) == text
    assert "<tool_results\n" not in shorten(text, 400)


# --- views ----------------------------------------------------------------------------------------


def test_a_history_that_fits_is_shown_whole() -> None:
    history = [GOAL, *block("a" * 900), *block("b" * 900)]
    view, shown = in_view(history, View(), limit=5_000)
    assert view.is_whole
    assert shown == history


def test_older_results_shrink_first_and_the_newest_blocks_stay_whole() -> None:
    history = [GOAL, *itertools.chain.from_iterable(block("x" * 2_000) for _ in range(9))]
    view, shown = in_view(history, View(), limit=15_000)
    assert (view.dropped, view.long) == (0, None)
    lengths = [len(each["content"]) for each in shown if each["role"] == "tool"]
    assert lengths == sorted(lengths)
    assert lengths[0] == SHORT
    assert lengths[-FRESH[0] :] == [2_000] * FRESH[0]


def test_then_whole_blocks_are_left_out_with_a_note_in_their_place() -> None:
    history = [GOAL, *itertools.chain.from_iterable(block("x" * 300) for _ in range(40))]
    view, shown = in_view(history, View(), limit=8_000)
    assert view.dropped in block_starts(history)
    assert shown[:2] == [GOAL, says(view.note)]
    assert shown[2:] == history[view.dropped :]
    assert f"look {(view.dropped - 1) // 2}." in view.note


def test_what_a_view_left_out_makes_room_for_steps_to_come() -> None:
    history = [GOAL, *itertools.chain.from_iterable(block("x" * 300) for _ in range(40))]
    view, _ = in_view(history, View(), limit=8_000)
    longer = [*history, *block("x" * 300), *block("x" * 300)]
    later, shown = in_view(longer, view, limit=8_000)
    assert later == view
    assert shown[: len(apply_view(history, view))] == apply_view(history, view)


def test_a_newest_block_that_is_too_much_alone_has_its_results_cut() -> None:
    history = [GOAL, *block("a" * 50_000), *block(*["b" * 60_000] * 4)]
    view, shown = in_view(history, View(), limit=20_000)
    assert view.long is not None
    assert size_of(shown) <= 20_000
    assert len([each for each in shown if each["role"] == "tool"]) == 4


def test_images_of_older_blocks_are_left_out_and_their_block_stays_one() -> None:
    history = [GOAL, *block("see"), images(2), *block("b"), *block("c"), *block("d" * 2_000)]
    assert 3 not in block_starts(history)
    view, shown = in_view(history, View(), limit=8_000)
    assert (view.dropped, view.shrunk) == (0, 4)
    assert [each["type"] for each in shown[3]["content"]] == ["text"] * 3
    assert history[3]["content"][1]["type"] == "image_url"


def test_what_the_user_sent_first_may_be_an_image_and_stays() -> None:
    goal = images()
    history = [goal, *block("a" * 9_000), *block("b")]
    assert apply_view(history, View(shrunk=3))[0] == goal


def test_a_goal_further_on_is_pinned_and_what_came_before_it_may_go() -> None:
    history = [says("hi"), says("hello", "assistant"), GOAL, *block("x" * 900), *block("y" * 900)]
    view = View(goal=2, dropped=5, note="[note]")
    assert apply_view(history, view) == [GOAL, says("[note]"), *history[5:]]
    early = View(goal=2, dropped=2, note="[note]")
    assert apply_view(history, early) == [says("[note]"), *history[2:]]


def test_a_note_tells_what_the_user_said_and_what_was_found() -> None:
    history = [GOAL, *block("x"), says("Never  above 50."), *block("y", "z", name="pay"), says("?")]
    found = [Evidence(source="ledger", text="paid 12"), Evidence(source="log", data={"token": "x"})]
    note = describe_dropped(history, View(dropped=6), found)
    assert "look 1, pay 2." in note
    assert "The user said in it: Never above 50.." in note
    assert "Found so far, as data: ledger: paid 12; log." in note
    assert "\n" not in note


def test_a_note_has_the_newest_evidence_where_not_all_fits() -> None:
    history = [GOAL, *block("x"), says("?")]
    found = [Evidence(source=f"source {n}", text="\u00e9" * 90) for n in range(50)]
    note = describe_dropped(history, View(dropped=3), found)
    assert len(note.encode()) <= NOTE_BYTES
    assert "older left out) source" in note
    assert "source 49" in note
    assert "source 0:" not in note


@pytest.mark.parametrize("text", ["<|im_end|>" * 400, "\u6f22" * 4_000, "\ud800", "]" * 3])
def test_a_note_is_bounded_and_harmless_whatever_it_is_made_of(text: str) -> None:
    for note in (close_note(text), note_of_summary(text)):
        assert len(note.encode()) <= NOTE_BYTES
        assert "<|im_end|>" not in note
        assert note.endswith("]")


def test_a_summary_is_asked_for_in_one_text_with_what_was_known_before() -> None:
    history = [GOAL, *block("old"), *block("x" * 9_000, text="Looking."), says("Quick!"), GOAL]
    view = View(dropped=6, note="[known]", shrunk=0)
    [asked] = summary_messages(history, view, start=3, most=5_000)
    text = asked["content"]
    assert asked["role"] == "user"
    for part in (
        GOAL["content"],
        "[known]",
        "Looking.",
        "look({})",
        "Quick!",
        "of 9000 characters",
    ):
        assert part in text
    assert "old" not in text.partition("# What will be left out")[2]
    assert len(summary_messages(history, view, start=1, most=200)[0]["content"]) < 1_500


# --- what a refusal tells -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "share", "asked"),
    [
        ("maximum context length is 8192 tokens", 0.6, None),
        ("context length is 8192 tokens. your messages resulted in 9000 tokens", 0.82, 9000),
        ("context length is 4096 tokens. you requested 9000 (8500 in the messages)", 0.41, 9000),
        ("prompt is too long: 210,000 tokens > 100,000 maximum", 0.43, 210_000),
        ('{"code": 400, "n_prompt_tokens": 5000, "n_ctx": 2500}', 0.45, 5000),
        ("no number at all", 0.6, None),
        ("1 2 req_123456789", 0.6, None),
        ("limit 100 of 99999999", 0.1, 99_999_999),
        ("limit of 8192, got 8193", 0.85, 8193),
    ],
)
def test_the_next_request_is_as_short_as_the_server_says(
    told: str, share: float, asked: int | None
) -> None:
    refusal = read_refusal(told)
    assert refusal.share == pytest.approx(share, abs=0.01)
    assert refusal.asked == asked


# --- whatever the history, whatever the limit -----------------------------------------------------

texts = st.one_of(
    st.text(max_size=30),
    st.integers(0, 9_000).map(lambda size: "x" * size),
    st.integers(0, 900).map(lambda size: "\u6f22" * size),
    st.integers(0, 900).map(lambda size: fence("<|im_start|>" * size)),
    st.integers(0, 900).map(lambda size: json.dumps({"id": size, "text": "y" * size})),
)
blocks = st.one_of(
    st.lists(texts, min_size=1, max_size=4).map(lambda results: block(*results)),
    st.lists(texts, min_size=1, max_size=2).map(lambda results: [*block(*results), images()]),
    texts.map(lambda text: [says(text)]),
    texts.map(lambda text: [says(text or "ok", "assistant")]),
    texts.map(lambda text: [says(text, "system")]),
)
histories = st.tuples(st.lists(blocks, max_size=3), st.lists(blocks, max_size=12)).map(
    lambda parts: (
        [*itertools.chain.from_iterable(parts[0]), GOAL, *itertools.chain.from_iterable(parts[1])],
        sum(map(len, parts[0])),
    )
)
limits = st.integers(100, 40_000)


@tool
def look() -> str:
    """Look somewhere."""
    return ""


AGENT = Agent(name="a", instructions="Be brief.", tools=[look])

unhurried = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@unhurried
@given(histories, limits, st.lists(limits, max_size=2))
def test_every_view_is_valid_and_has_what_is_pinned(
    made: tuple[list[Message], int], limit: int, earlier: list[int]
) -> None:
    history, goal = made
    before = copy.deepcopy(history)
    view = View(goal=goal, keep={"look": ("id",)})
    for each in (*earlier, limit):
        view, shown = in_view(history, view, each)
    request = build_request(
        AGENT, model="m", history=history, corrections=[], step=1, timeout=1.0, view=view
    )

    body = write_request(request)
    assert check_request(body) == []
    assert history == before, "the stored history never changes"
    assert request.messages[0] == {"role": "system", "content": "Be brief."}
    assert shown == list(request.messages[1:])
    assert GOAL in shown
    pinned = [each for each in history if each["role"] == "system"]
    assert [each for each in shown if each["role"] == "system"] == pinned
    assert view.dropped in (0, *block_starts(history))
    assert view.long is not None or shown[-1] == history[-1]
    assert size_of(shown) <= max(limit, size_of(history))

    described = describe_request(request, history=len(history), corrections=0, view=view)
    told, agent = json.loads(json.dumps([described, describe_agent(AGENT)]))
    assert rebuild_request(told, agent, [*history, GOAL])["messages"] == list(request.messages)
    assert read_view(told.get("view", {})).dropped == view.dropped


@unhurried
@given(histories, limits, limits)
def test_a_smaller_limit_never_shows_more(
    made: tuple[list[Message], int], one: int, other: int
) -> None:
    history, goal = made
    least, most = sorted([one, other])
    small, large = (fit_view(history, View(goal=goal), limit=each) for each in (least, most))
    assert small.dropped >= large.dropped
    assert small.shrunk >= large.shrunk
    assert (small.long or 2**20) <= (large.long or 2**20)


@unhurried
@given(histories, blocks, limits)
def test_what_was_left_out_once_stays_left_out_and_nothing_is_lost_between(
    made: tuple[list[Message], int], more: list[Message], limit: int
) -> None:
    history, goal = made
    first, _ = in_view(history, View(goal=goal), limit)
    longer = [*history, *more]
    second, shown = in_view(longer, replace(first, long=None), limit)
    assert second.dropped >= first.dropped
    assert second.shrunk >= first.shrunk
    kept = longer[second.dropped :]
    assert [each["role"] for each in shown[len(shown) - len(kept) :]] == [m["role"] for m in kept]
    if second.dropped == first.dropped:
        assert second.note == first.note
    else:
        assert second.note == describe_dropped(longer, second), "a note of all that is left out"
