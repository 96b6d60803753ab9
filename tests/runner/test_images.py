"""Images that a tool returns reach the model behind their block, and the history stays valid."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from runner import Agent, Image, StopReason, ToolError, tool
from runner.images import MAX_DEPTH, MAX_IMAGE_BYTES, image_parts, take_images
from runner.loop import CallTools, Finish, NextStep, Wait, cancel_run
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support.loops import RUN, Loops, check_requests, drive, open_loops

RED, BLUE = Image(b"red"), Image(b"blue", "image/jpeg")
SEEN_RED = "[image 1: image/png, 3 bytes; it follows]"


# --- the values themselves ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown", "found"),
    [
        (RED, SEEN_RED, [RED]),
        ([RED, "x", BLUE], [SEEN_RED, "x", "[image 2: image/jpeg, 4 bytes; it follows]"], None),
        ({"page": {"shot": RED}, "n": 1}, {"page": {"shot": SEEN_RED}, "n": 1}, [RED]),
        ((RED, 1), (SEEN_RED, 1), [RED]),
        ({"none": [b"red", None, 1.5]}, {"none": [b"red", None, 1.5]}, []),
    ],
)
def test_a_line_stands_in_the_place_of_each_image(value: Any, shown: Any, found: Any) -> None:
    images: list[Image] = []
    assert take_images(value, images) == shown
    assert images == ([RED, BLUE] if found is None else found)


def test_the_same_image_twice_is_shown_twice() -> None:
    images: list[Image] = []
    take_images([RED, RED], images)
    assert images == [RED, RED]


def test_a_cycle_and_what_lies_too_deep_are_left_as_they_are() -> None:
    cycle: list[Any] = [RED]
    cycle.append(cycle)
    images: list[Image] = []
    taken = take_images(cycle, images)
    assert images == [RED]
    assert taken[1] is cycle
    deep: Any = RED
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert take_images(deep, []) == deep
    assert take_images(deep[0], images) == [[["[image 2: image/png, 3 bytes; it follows]"]]]


@pytest.mark.parametrize("media_type", ["image/svg+xml", "text/html", "", "IMAGE/PNG"])
def test_another_kind_of_image_is_refused(media_type: str) -> None:
    with pytest.raises(ValueError, match="image/png, image/jpeg"):
        Image(b"x", media_type)


@pytest.mark.parametrize("size", [0, MAX_IMAGE_BYTES + 1])
def test_an_image_that_is_empty_or_too_big_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="1 to 5000000 bytes"):
        Image(b"x" * size)
    Image(b"x" * MAX_IMAGE_BYTES)


@pytest.mark.parametrize("data", ["red", [1, 2], bytearray(b"red"), None])
def test_what_is_no_bytes_is_refused_where_it_is_made(data: Any) -> None:
    with pytest.raises(TypeError, match="bytes"):
        Image(data)


def test_the_parts_say_where_they_are_from() -> None:
    assert image_parts((), "0.0") == []
    [said, shown] = image_parts((RED,), "3.1")
    assert said["type"] == "text"
    assert "3.1" in said["text"]
    encoded = base64.b64encode(b"red").decode()
    assert shown == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


# --- what a run makes of them ------------------------------------------------------------------


@tool(idempotent=True)
def shoot() -> Image:
    """Take a picture."""
    return RED


@tool(idempotent=True)
def shoot_many() -> list[Image | str]:
    """Take some pictures."""
    return ["two:", BLUE, RED]


@tool(idempotent=True)
def shoot_page() -> dict[str, Any]:
    """Take a picture of a page."""
    return {"title": "Home", "shot": BLUE}


@tool(idempotent=True)
def shoot_huge() -> Image:
    """Take a picture that is too big."""
    return Image(b"x" * (MAX_IMAGE_BYTES + 1))


@tool(idempotent=True)
def shoot_text() -> Image:
    """Take a picture that is none."""
    return Image("red")  # type: ignore[arg-type]


@tool(idempotent=True)
def say() -> str:
    """Say something."""
    return "said"


@tool
def stop() -> str:
    """End the run."""
    raise ToolError("stop", fatal=True)


TOOLS = [shoot, shoot_many, shoot_page, shoot_huge, shoot_text, say, stop]


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


def start(loops: Loops, model: ScriptedModel) -> Any:
    return loops.start(Agent(name="a", model=model, tools=TOOLS))


def shown(message: dict[str, Any]) -> list[str]:
    """What a message of parts shows: a call's id, or an image's bytes."""
    assert message["role"] == "user"
    told: list[str] = []
    for part in message["content"]:
        if part["type"] == "text":
            told.append(part["text"].partition("call ")[2].partition(",")[0])
        else:
            encoded = part["image_url"]["url"].partition("base64,")[2]
            told.append(base64.b64decode(encoded).decode())
    return told


def test_an_image_follows_its_block_in_a_message_of_its_own(loops: Loops) -> None:
    model = ScriptedModel([calls(("shoot", {})), "done"])
    assert drive(start(loops, model)) == Finish(RUN, StopReason.COMPLETED)
    assert loops.contents() == [SEEN_RED]
    [goal, turn, result, images] = model.requests[1].messages
    assert [goal["role"], turn["role"], result["role"]] == ["user", "assistant", "tool"]
    assert shown(images) == ["0.0", "red"]
    check_requests(loops.store, model.requests)


def test_images_inside_of_lists_and_dicts_are_found(loops: Loops) -> None:
    model = ScriptedModel([calls(("shoot_many", {})), calls(("shoot_page", {})), "done"])
    drive(start(loops, model))
    many, page = loops.contents()
    assert "[image 1: image/jpeg, 4 bytes; it follows]" in many
    assert "[image 2: image/png, 3 bytes; it follows]" in many
    assert "Home" in page
    assert "[image 1: image/jpeg, 4 bytes; it follows]" in page
    said = [each for each in loops.store.read_messages(RUN)[1:] if each["role"] == "user"]
    assert [shown(each) for each in said] == [["0.0", "blue", "red"], ["1.0", "blue"]]
    check_requests(loops.store, model.requests)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_one_message_shows_all_images_of_a_block_in_the_order_of_its_calls(
    loops: Loops, order: tuple[int, ...]
) -> None:
    model = ScriptedModel([calls(("shoot_many", {}), ("say", {}), ("shoot", {})), "done"])
    loop = start(loops, model)
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0, 1, 2))
    answers = [loop.call_tool(RUN, 0, index) for index in order]
    assert answers == [Wait(RUN), Wait(RUN), NextStep(RUN, 1)]
    drive(loop, NextStep(RUN, 1))
    messages = model.requests[1].messages
    assert [each["role"] for each in messages[2:]] == ["tool", "tool", "tool", "user"]
    assert shown(messages[5]) == ["0.0", "blue", "red", "0.2", "red"]
    check_requests(loops.store, model.requests)


@pytest.mark.parametrize("name", ["shoot_huge", "shoot_text"])
def test_what_is_no_image_to_show_is_the_tools_error(loops: Loops, name: str) -> None:
    model = ScriptedModel([calls((name, {}), ("say", {})), "done"])
    assert drive(start(loops, model)) == Finish(RUN, StopReason.COMPLETED)
    failed, said = loops.contents()
    assert '"type":"TOOL_ERROR"' in failed
    assert said == "said"
    assert [each["role"] for each in model.requests[1].messages[2:]] == ["tool", "tool"]
    check_requests(loops.store, model.requests)


def test_images_of_a_block_that_a_cancel_closes_still_follow_it(loops: Loops) -> None:
    loop = start(loops, ScriptedModel([calls(("shoot", {}), ("say", {}))]))
    loop.advance(RUN, 0)
    assert loop.call_tool(RUN, 0, 0) == Wait(RUN)
    cancel_run(loops.store, RUN, "enough")
    messages = loops.store.read_messages(RUN)
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert shown(messages[-1]) == ["0.0", "red"]


def test_the_images_themselves_are_in_no_trace_and_no_event(loops: Loops) -> None:
    drive(start(loops, ScriptedModel([calls(("shoot", {})), "done"])))
    encoded = base64.b64encode(b"red").decode()
    assert encoded not in str(loops.store.read_trace(RUN))
    assert encoded not in str(loops.store.read_events(RUN, "0"))
