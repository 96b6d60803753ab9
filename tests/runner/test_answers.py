"""A final answer is checked before it is final, and what is wrong with it is told to the model."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from runner import Agent
from runner.answers import read_answer


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
    answer, problem = read_answer(TYPED, text)
    assert answer is None
    assert problem is not None
    assert word in problem
    assert "Answer again" in problem
    assert "and more" not in problem


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
    _, problem = read_answer(agent, str(["x"] * 500).replace("'", '"'))
    assert problem is not None
    assert len(problem) < 1500
