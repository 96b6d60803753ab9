"""Hostile JSON in what a model answers, from the response's body to a typed answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from runner import Agent, Limits, Result, StopReason, tool
from runner.errors import ModelError
from runner.reader import read_reply
from runner.testing import ScriptedModel, run_agent

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5_000

HOSTILE = {
    "deep": DEEP,
    "deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "a long number": LONG,
    "a long fraction": f"0.{LONG}",
    "a large exponent": "1e999999",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "half a pair": r'"\ud800"',
    "a swapped pair": r'"\udc00\ud800"',
    "NUL": r'"a\u0000b"',
    "a long text": json.dumps("x" * 2_000_000),
    "a key twice": '{"n": 1, "n": 2}',
    "a key twice, escaped": r'{"n": 1, "\u006e": 2}',
    "2**53 + 1": str(2**53 + 1),
    "2**63": str(2**63),
    "-2**63 - 1": str(-(2**63) - 1),
    "2**64": str(2**64),
    "minus zero": "-0",
    "a prototype": '{"__proto__": {"admin": true}, "__class__": "os.system"}',
}


class Number(BaseModel):
    n: int


@tool(idempotent=True)
def echo(value: Any) -> Any:
    """Give back what came."""
    return value


ECHO = Agent(name="echo", tools=[echo], limits=Limits(max_steps=3), response_retries=1)
TYPED = Agent(name="typed", output_type=Number, response_retries=1)


def raw(*bodies: str) -> ScriptedModel:
    """A model whose responses are these bodies, read as a server's are; then it is done."""
    given = [*bodies, *[body(content='"done"')] * 3]
    return ScriptedModel([partial(lambda text, _: read_reply(text), each) for each in given])


def body(*, content: str = "null", arguments: str | None = None, extra: str = "1") -> str:
    """A response with JSON texts at the places where a stranger's may be."""
    call = f'[{{"id": "c1", "function": {{"name": "echo", "arguments": {arguments}}}}}]'
    calls = "" if arguments is None else f', "tool_calls": {call}'
    usage = f'{{"prompt_tokens": {extra}, "completion_tokens": 1, "total_tokens": {extra}}}'
    message = f'{{"role": "assistant", "content": {content}{calls}}}'
    return f'{{"choices": [{{"message": {message}}}], "usage": {usage}, "x": {extra}}}'


PLACES: dict[str, Callable[[str], str]] = {
    "arguments as text": lambda text: body(arguments=json.dumps(f'{{"value": {text}}}')),
    "arguments as an object": lambda text: body(arguments=f'{{"value": {text}}}'),
    "all of the arguments": lambda text: body(arguments=json.dumps(text)),
    "the content": lambda text: body(content=text),
    "the usage": lambda text: body(content='"done"', extra=text),
    "all of the body": lambda text: text,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_run_ends_whatever_the_model_sends(place: Callable[[str], str], text: str) -> None:
    model = raw(place(text))

    result = run_agent(ECHO, "go", model=model)

    assert result.stop_reason in (StopReason.COMPLETED, StopReason.ERROR)
    if result.error is not None:
        assert len(result.error.message) < 1_000
    for request in model.requests:
        sent = json.dumps(request.messages, ensure_ascii=False, allow_nan=False)
        assert json.loads(sent.encode()) == list(request.messages)


@pytest.mark.parametrize("number", [2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**300])
def test_a_number_beyond_64_bits_goes_through_a_run_as_it_is(number: int) -> None:
    model = raw(body(arguments=json.dumps(f'{{"value": {number}}}')))

    assert run_agent(ECHO, "go", model=model).ok

    [told] = [each for each in model.requests[-1].messages if each["role"] == "tool"]
    assert told["content"] == str(number)


@pytest.mark.parametrize("text", [*HOSTILE.values(), "[]", "null"], ids=[*HOSTILE, "[]", "null"])
def test_a_typed_answer_is_what_it_says_or_is_refused(text: str) -> None:
    answer = json.dumps(f'{{"n": {text}}}', ensure_ascii=True)
    model = raw(*[body(content=answer)] * 2)

    result = run_agent(TYPED, "go", model=model)

    if result.ok:
        assert result.answer == {"n": json.loads(text)}
    else:
        assert result.error is not None
        assert result.error.type == "INVALID_FINAL"


def test_a_twice_named_key_never_reaches_a_tool() -> None:
    ran: list[int] = []

    @tool
    def pay(cents: int) -> Result[str]:
        """Pay."""
        ran.append(cents)
        return Result("paid")

    agent = Agent(name="payer", tools=[pay])
    entry = {"id": "c", "function": {"name": "pay", "arguments": '{"cents": 1, "cents": 1000000}'}}
    turn = json.dumps({"choices": [{"message": {"content": None, "tool_calls": [entry]}}]})

    assert run_agent(agent, "go", model=raw(turn)).ok
    assert ran == []


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_only_a_model_error_comes_out_of_a_body(text: str) -> None:
    with pytest.raises(ModelError) as error:
        read_reply(text)
    assert len(str(error.value)) < 200
