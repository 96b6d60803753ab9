"""Whatever a tool returns can be shown to a model."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import OrderedDict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from ipaddress import IPv4Address
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, SecretStr, field_serializer
from pydantic.dataclasses import dataclass as pydantic_dataclass

from runner.models import ToolErrorInfo
from runner.render import clean, cut, render, render_error, to_json

CAP = 65_536


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Word(StrEnum):
    YES = "yes"


class Account(BaseModel):
    a: int
    token: SecretStr
    hidden: str = Field("h", exclude=True)
    ratio: float = float("nan")
    raw: bytes = b""


class Masked(BaseModel):
    pin: str

    @field_serializer("pin", when_used="json")
    def mask(self, pin: str) -> str:
        return "*" * len(pin)


class Loose(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    thing: object


@dataclass
class Point:
    x: int
    at: date


@pydantic_dataclass
class Login:
    user: str
    password: SecretStr


Pair = namedtuple("Pair", "left right")


class Opaque:
    def __repr__(self) -> str:
        return "hunter2"

    __str__ = __repr__


class Hostile(list[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("hunter2")


def show(value: object) -> str:
    return render(value, max_chars=CAP).content


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("plain, {not: json}", "plain, {not: json}"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        ([], "[]"),
        ({}, "{}"),
        (0, "0"),
        (9007199254740993, "9007199254740993"),
        (1.5, "1.5"),
        (float("nan"), "null"),
        (float("-inf"), "null"),
        ({"k": "你好", "n": 1}, '{"k":"你好","n":1}'),
        (Decimal("1.10"), '"1.10"'),
        (datetime(2020, 1, 1, tzinfo=UTC), '"2020-01-01T00:00:00+00:00"'),
        ([date(2020, 1, 2), time(3, 4)], '["2020-01-02","03:04:00"]'),
        (timedelta(days=1), '"P1D"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        ([Color.RED, Level.HIGH, Word.YES], '["red",3,"yes"]'),
        (Word.YES, "yes"),
        ({10, 9, 1}, "[1,9,10]"),
        (frozenset({"b", "a"}), '["a","b"]'),
        ((1, "a"), '[1,"a"]'),
        (Pair(1, 2), "[1,2]"),
        (deque([1]), "[1]"),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        (b"text", '"text"'),
        (b"\xff", json.dumps(b64encode(b"\xff").decode())),
        ({1: "a", None: "b", Color.RED: "c", (1, 2): "d"},
         '{"1":"a","null":"b","red":"c","[1,2]":"d"}'),
        (Point(1, date(2020, 1, 1)), '{"x":1,"at":"2020-01-01"}'),
        ([PurePosixPath("/a"), IPv4Address("127.0.0.1"), AnyUrl("http://a/")],
         '["/a","127.0.0.1","http://a/"]'),
        (SecretStr("hunter2"), '"**********"'),
        (Login("u", SecretStr("hunter2")), '{"user":"u","password":"**********"}'),
        (Masked(pin="1234"), '{"pin":"****"}'),
    ],
)  # fmt: skip
def test_a_value_is_shown_as_text_or_compact_json(value: object, content: str) -> None:
    assert show(value) == content


def test_everything_that_json_cannot_carry_still_makes_valid_json() -> None:
    mixed = {"d": Decimal("1.10"), "s": {1}, "b": b"\xff", "n": float("nan"), "u": UUID(int=1)}
    assert json.loads(show({**mixed, "o": object(), "m": [Color.RED]})) == {
        "d": "1.10",
        "s": [1],
        "b": "/w==",
        "n": None,
        "u": str(UUID(int=1)),
        "o": "[object: has no JSON form]",
        "m": ["red"],
    }


@pytest.mark.parametrize("raw", [b"ok", b"\xff"])
def test_a_model_keeps_its_secrets_also_when_it_holds_bytes(raw: bytes) -> None:
    shown = show([Account(a=1, token=SecretStr("hunter2"), raw=raw)])
    assert "hunter2" not in shown
    assert json.loads(shown)[0]["token"] == "**********"
    assert "hidden" not in shown


@pytest.mark.parametrize(
    "value",
    [
        Opaque(),
        Opaque,
        Hostile([1]),
        Loose(thing=Opaque()),
        [Opaque()],
        (n for n in [1]),
        lambda: 1,
        ValueError("hunter2"),
    ],
)
def test_what_has_no_json_form_is_named_by_its_type_and_never_by_its_repr(value: object) -> None:
    shown = show(value)
    assert "has no JSON form" in shown
    assert "hunter2" not in shown


def test_an_iterator_is_not_consumed() -> None:
    numbers = iter([1, 2])
    show(numbers)
    assert next(numbers) == 1


def test_a_cycle_and_a_deep_nest_end() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    assert json.loads(show(cycle)) == [1, {"again": "[list: contains itself]"}]
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    assert "nested too deeply" in show(deep)


def test_a_value_that_appears_twice_is_no_cycle() -> None:
    inner = [1]
    assert show([inner, inner]) == "[[1],[1]]"


def test_an_integer_too_long_for_python_to_print_is_exact_in_hexadecimal() -> None:
    data = to_json(10**5000)
    assert isinstance(data, str)
    assert int(data, 16) == 10**5000


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("a\ud83d", "a\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("a\0b", "a\ufffdb"),
        ("line\n\t你好😀", "line\n\t你好😀"),
    ],
)
def test_text_is_always_valid_unicode_without_nul(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned
    assert show(text) == cleaned
    assert json.loads(show({text: [text]})) == {cleaned: [cleaned]}


def test_a_long_result_is_cut_visibly_within_the_cap() -> None:
    shown = render("x" * 1_000_000, max_chars=CAP)
    assert len(shown.content) <= CAP
    assert shown.truncated
    assert shown.output_chars == 1_000_000
    assert shown.data is None
    head, _, marker = shown.content.partition("\n")
    assert marker == f"... [cut: {len(head)} of 1000000 characters shown]"


def test_a_result_of_exactly_the_cap_is_whole() -> None:
    assert not render("x" * 300, max_chars=300).truncated
    assert render("x" * 301, max_chars=300).truncated
    assert render(["x" * 300], max_chars=300).output_chars == 304


@settings(deadline=None)
@given(st.text(min_size=1), st.integers(min_value=1, max_value=500))
def test_a_cut_never_exceeds_its_limit(text: str, limit: int) -> None:
    assert len(cut(text * 50, limit)) <= limit


def test_an_error_is_compact_json_without_empty_keys() -> None:
    error = ToolErrorInfo(
        type="INVALID_ARGUMENT",
        message="path is required",
        retryable=True,
        fields={"path": "missing"},
    )
    assert render_error(error) == (
        '{"ok":false,"error":{"type":"INVALID_ARGUMENT","message":"path is required",'
        '"retryable":true,"fields":{"path":"missing"}}}'
    )
    assert "fields" not in render_error(ToolErrorInfo(type="TOOL_ERROR", message="x"))


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.decimals(),
    st.datetimes(),
    st.uuids(),
    st.timedeltas(),
    st.complex_numbers(),
)
_HASHABLE = st.one_of(
    st.text(st.characters(codec=None)), st.integers(), st.booleans(), st.none(), st.binary()
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner) | st.dictionaries(_HASHABLE, inner) | st.frozensets(_HASHABLE)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None)
@given(_VALUES)
def test_any_value_renders_to_text_or_valid_json(value: object) -> None:
    shown = render(value, max_chars=CAP)
    shown.content.encode()
    if not isinstance(value, str) and not shown.truncated:
        assert json.loads(shown.content) == shown.data
