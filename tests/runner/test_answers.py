"""A final answer is checked before it is final, and what is wrong with it is told to the model."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from runner import Agent, Draft, Evidence, ToolError, tool
from runner.answers import MAX_ANNOUNCEMENT_CHARS, Fault, find_fault, read_answer


class Answer(BaseModel):
    city: str
    people: int = Field(ge=0, alias="inhabitants")


PLAIN = Agent(name="a")
TYPED = Agent(name="a", output_type=Answer)


@pytest.mark.parametrize("text", ["", "Rome", '{"city": 1}', "```json\n1\n```"])
def test_without_a_type_any_text_is_final(text: str) -> None:
    assert read_answer(PLAIN, text) == (text, None)


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Rome", "inhabitants": 3}',
        ' \n{"city": "Rome", "inhabitants": "3"} ',
        '```json\n{"city": "Rome", "inhabitants": 3}\n```',
        '```\n{"city": "Rome", "inhabitants": 3}\n```\n',
    ],
)
def test_an_answer_of_the_type_is_final_fenced_or_not(text: str) -> None:
    answer, problem = read_answer(TYPED, text)
    assert problem is None
    assert isinstance(answer, dict)
    assert sorted(answer.values(), key=str) == [3, "Rome"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Rome", "JSON"),
        ("", "JSON"),
        ('{"city": "Rome"}', "inhabitants"),
        ('{"city": "Rome", "inhabitants": -1}', "inhabitants"),
        ("[]", "answer"),
        ('{"city": "Rome", "inhabitants": 3} and more', "JSON"),
    ],
)
def test_what_is_wrong_is_told_without_repeating_the_answer(text: str, word: str) -> None:
    answer, fault = read_answer(TYPED, text)
    assert answer is None
    assert fault is not None
    assert word in fault.text
    assert "Answer again" in fault.text
    assert "and more" not in fault.text


@pytest.mark.parametrize(
    ("output", "text", "answer"),
    [
        (int, "9007199254740993", 9007199254740993),
        (list[int], "[]", []),
        (bool, "false", False),
        (str, '"naïve 😀"', "naïve 😀"),
    ],
)
def test_plain_types_are_answers_too(output: type, text: str, answer: Any) -> None:
    assert read_answer(Agent(name="a", output_type=output), text) == (answer, None)


def test_only_the_first_faults_are_told() -> None:
    agent = Agent(name="a", output_type=list[int])
    _, fault = read_answer(agent, str(["x"] * 500).replace("'", '"'))
    assert fault is not None
    assert len(fault.text) < 1500
    assert len(fault.check) < 500


@pytest.mark.parametrize(
    ("output", "text", "check"),
    [
        (Answer, "Rome", "output_type (answer: json_invalid)"),
        (Answer, '{"city": "Rome"}', "output_type (inhabitants: missing)"),
        (
            list[Answer],
            '[{"city": 1, "inhabitants": -1}]',
            "output_type (0.city: string_type, 0.inhabitants: greater_than_equal)",
        ),
        (dict[str, int], '{"secret": "secret"}', "output_type (*: int_parsing)"),
        (int | None, '"secret"', "output_type (answer: int_parsing)"),
    ],
)
def test_an_error_names_the_fields_that_are_wrong_and_nothing_of_the_answer(
    output: Any, text: str, check: str
) -> None:
    _, fault = read_answer(Agent(name="a", output_type=output), text)
    assert fault is not None
    assert fault.check == check


# --- announcements -----------------------------------------------------------------------------


@tool
def look() -> str:
    """Look somewhere."""
    raise AssertionError("an answer is checked without running anything")


ABLE = Agent(name="a", tools=[look])


@pytest.mark.parametrize(
    "text",
    [
        "Let me check the order...",
        "Let me check.",
        "Let me see",
        "Let me see what I can find.",
        "Let me take a look at that for you.",
        "let me just quickly look that up",
        "Let me pull up the order.",
        "Let me start by reading the file.",
        "Let me check order A001.",
        "Let's check the stock first.",
        "I'll check the order.",
        "I\u2019ll look into it right away!",
        "I will now search the catalogue.",
        "I am going to fetch the report.",
        "I'm going to verify that.",
        "I'm checking the order now.",
        "I need to check the order first.",
        "Sure! Let me check the order. One moment, please.",
        "Okay, I'll get that for you. This may take a moment.",
        "Of course, let me find the order status:",
        "One moment please.",
        "Please wait while I look.",
        "**Let me check the order**",
        "\n  Let me check the order\n\nPlease wait a moment.\n",
    ],
)
def test_what_only_says_what_is_about_to_be_done_is_no_answer(text: str) -> None:
    _, problem = read_answer(ABLE, text)
    assert problem is not None
    assert "Call the tool now" in problem.text
    assert read_answer(PLAIN, text) == (text, None), "without tools there is nothing to call"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes.",
        "I'll be brief: yes",
        "Let me know if you need more.",
        "Let me know if you want to see more.",
        "I'll get straight to it, yes.",
        "I'll get straight to the point: no.",
        "Let me be clear, you can't get a refund.",
        "Let me look: it was shipped on Monday.",
        "I'll start with the good news, the refund was approved.",
        "I will not look into other people's orders.",
        "I won't check that.",
        "I'm going to be honest, I could not find the order.",
        "I need to see your receipt before I can start.",
        "I need to verify your identity first.",
        "I need to know your order number before I can check it.",
        "I'll need your order number to find it.",
        "Let me check. The order was shipped.",
        "Let's see... the order was shipped.",
        "Shall I check the order?",
        "Let me check: which order do you mean?",
        "I'll see you tomorrow!",
        "I'm looking forward to it!",
        "I'll wait for your reply.",
        "Please wait for the parcel; it arrives soon.",
        "Hold on to the receipt, you will need it to get the money back.",
        "The order is being checked; let me know if it takes long.",
        "I checked the order and it is fine.",
        "Checking the stock takes a day.",
        "Letters are read on Mondays.",
        "I'm reading between the lines" + " of it" * 40,
        "Let me check " + "x" * MAX_ANNOUNCEMENT_CHARS,
    ],
)
def test_a_short_answer_that_sounds_like_it_is_final(text: str) -> None:
    assert read_answer(ABLE, text) == (text, None)


def test_an_answer_of_a_type_is_no_announcement_whatever_it_says() -> None:
    agent = Agent(name="a", tools=[look], output_type=str)
    assert read_answer(agent, '"Let me check the order."') == ("Let me check the order.", None)


# --- validators --------------------------------------------------------------------------------

DRAFT = Draft(goal="go", text="Rome", answer="Rome")


def test_the_first_validator_that_finds_fault_is_heard_and_no_other() -> None:
    heard: list[str] = []

    def accept(draft: Draft) -> str | None:
        heard.append(f"accept {draft.text}")
        return None

    def refuse(draft: Draft) -> str | None:
        return f"{draft.answer} isn't a country"

    def never(draft: Draft) -> str | None:
        raise AssertionError("the one before has found fault")

    fault = find_fault(Agent(name="a", validators=[accept, refuse, never]), DRAFT)
    assert fault == Fault("validator refuse", "Your answer was not accepted: Rome isn't a country")
    assert heard == ["accept Rome"]


def test_without_a_fault_an_answer_stands() -> None:
    assert find_fault(Agent(name="a"), DRAFT) is None
    validators = [lambda draft: None, lambda draft: ""]
    assert find_fault(Agent(name="a", validators=validators), DRAFT) is None


def test_a_validator_that_raises_has_found_fault_and_its_text_stays_here() -> None:
    def crash(draft: Draft) -> str | None:
        raise KeyError("a secret")

    def tell(draft: Draft) -> str | None:
        raise ToolError("name a country")

    crashed = find_fault(Agent(name="a", validators=[crash]), DRAFT)
    assert crashed is not None
    assert "KeyError" in crashed.text
    assert "secret" not in f"{crashed}"
    assert crashed.check == "validator crash"
    told = find_fault(Agent(name="a", validators=[tell]), DRAFT)
    assert told == Fault("validator tell", "Your answer was not accepted: name a country")


def test_where_evidence_is_required_an_answer_without_any_goes_back() -> None:
    agent = Agent(name="a", evidence_required=True, validators=[lambda draft: "never asked"])
    fault = find_fault(agent, DRAFT)
    assert fault is not None
    assert "rests on nothing" in fault.text
    assert fault.check == "evidence_required"
    found = Draft(goal="go", text="Rome", answer="Rome", evidence=[Evidence(source="map")])
    assert find_fault(Agent(name="a", evidence_required=True), found) is None
