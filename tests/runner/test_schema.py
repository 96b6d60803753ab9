"""What a model is told of a tool's arguments, and what is accepted from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from runner.errors import ToolDefinitionError
from runner.models import ToolErrorInfo
from runner.tools import Tool, tool


class Color(Enum):
    RED = "red"


class Line(BaseModel):
    sku: str
    count: int = 1
    note: str | None = None


class Node(BaseModel):
    v: int
    nxt: Node | None = Field(None, description="next")


class Tree(BaseModel):
    v: int
    children: list[Annotated[Tree, Field(description="a child")]]


class Endless(BaseModel):
    v: int
    nxt: Endless = Field(description="next")


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    lives: int | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


@dataclass
class Point:
    x: int
    y: int = 0


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool
def save(text: str) -> str:
    """Save."""
    return text


@tool
def scale(x: float) -> float:
    """Scale."""
    return x


@tool
def order(line: Line, tags: list[str] | None = None) -> str:
    """Order."""
    return line.sku


@tool(strict=True)
def strict_order(line: Line, n: int = 10, both: int | None = 5) -> str:
    """Order."""
    return line.sku


@tool(strict=True)
def pet(animal: Annotated[Cat | Dog, Field(discriminator="kind")]) -> str:
    """Pet."""
    return animal.kind


def keywords(schema: Any) -> set[str]:
    """Every keyword of a schema; names of properties and definitions aren't keywords."""
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for key, value in schema.items():
        named = key in ("properties", "$defs")
        found |= keywords(list(value.values()) if named else value)
    return found


def accept(each: Tool, **arguments: Any) -> dict[str, Any]:
    parsed = each.parse(json.dumps(arguments))
    assert isinstance(parsed, dict), parsed
    return parsed


def refuse(each: Tool, text: str) -> ToolErrorInfo:
    error = each.parse(text)
    assert isinstance(error, ToolErrorInfo), error
    assert error.type == "INVALID_ARGUMENT"
    assert error.retryable
    return error


def test_a_signature_becomes_a_closed_object_schema() -> None:
    assert add.parameters == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }


def test_a_parameter_may_have_any_name_and_a_description() -> None:
    @tool
    def odd(copy: Annotated[int, Field(description="how many", gt=0)], model_config: str) -> str:
        """Odd."""
        return model_config

    assert odd.parameters["properties"]["copy"] == {
        "type": "integer",
        "description": "how many",
        "exclusiveMinimum": 0,
    }
    assert accept(odd, copy=1, model_config="x") == {"copy": 1, "model_config": "x"}


def test_descriptions_of_arguments_are_read_from_the_docstring() -> None:
    @tool
    def google(path: str, depth: int = 1) -> str:
        """List files.

        Args:
            path (str): Where to look,
                from the root.
            depth: How deep.

        Returns:
            The names.
        """
        return path

    @tool
    def sphinx(path: str) -> str:
        """List files.

        :param str path: Where to look.
        """
        return path

    properties = google.parameters["properties"]
    assert properties["path"]["description"] == "Where to look, from the root."
    assert properties["depth"]["description"] == "How deep."
    assert google.description == "List files.\n\nReturns:\n    The names."
    assert sphinx.parameters["properties"]["path"]["description"] == "Where to look."
    assert sphinx.description == "List files."


def test_a_default_makes_an_argument_optional() -> None:
    @tool
    def page(n: int = 10) -> str:
        """Page."""
        return str(n)

    assert "required" not in page.parameters
    assert page.parameters["properties"]["n"] == {"type": "integer", "default": 10}
    assert page.function(**accept(page)) == "10"


def test_open_ended_objects_are_accepted_outside_of_strict_mode() -> None:
    @tool
    def tag(meta: dict[str, object]) -> str:
        """Tag."""
        return ""

    assert not tag.strict
    assert "strict" not in tag.definition()["function"]
    assert accept(tag, meta={"a": [1, {"b": None}]}) == {"meta": {"a": [1, {"b": None}]}}


def test_strict_mode_requires_every_key_and_lets_null_stand_for_a_default() -> None:
    parameters = strict_order.parameters
    assert strict_order.definition()["function"]["strict"] is True
    assert parameters["required"] == ["line", "n", "both"]
    assert parameters["properties"]["n"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    line = parameters["$defs"]["Line"]
    assert line["required"] == ["sku", "count", "note"]
    assert line["additionalProperties"] is False
    assert "default" not in keywords(parameters)

    sent: dict[str, Any] = {"line": {"sku": "x", "count": None, "note": None}, "n": None}
    assert accept(strict_order, **sent) == {"line": Line(sku="x")}
    # A type that takes null itself gets it: only so can the model say it.
    assert accept(strict_order, **sent, both=None)["both"] is None


def test_null_for_a_required_argument_is_refused_in_strict_mode_too() -> None:
    assert refuse(strict_order, '{"line": null}').fields == {"line": "Input should be an object"}


def test_a_literal_of_several_kinds_has_a_type_in_strict_mode() -> None:
    @tool(strict=True)
    def f(p: Literal["a", 1, None]) -> str:
        """F."""
        return ""

    assert f.parameters["properties"]["p"] == {
        "enum": ["a", 1, None],
        "type": ["integer", "null", "string"],
    }


def test_a_discriminated_union_is_an_any_of_in_strict_mode() -> None:
    assert not keywords(pet.parameters) & {"oneOf", "discriminator"}
    assert "anyOf" in keywords(pet.parameters)
    assert accept(pet, animal={"kind": "cat", "lives": None}) == {"animal": Cat(kind="cat")}
    assert accept(pet, animal={"kind": "dog", "lives": None}) == {"animal": Dog(kind="dog")}


def test_a_recursive_model_is_a_definition_that_refers_to_itself() -> None:
    @tool
    def walk(n: Node) -> int:
        """Walk."""
        return n.v

    assert "Node" in walk.parameters["$defs"]
    assert accept(walk, n={"v": 1, "nxt": {"v": 2}})["n"].nxt.v == 2


@pytest.mark.parametrize("model", [Node, Tree])
def test_recursion_that_ends_is_kept_in_strict_mode_with_nothing_beside_a_ref(
    model: type[BaseModel],
) -> None:
    def walk(n: model) -> int:  # type: ignore[valid-type]
        """Walk."""
        return 1

    def check(schema: Any) -> None:
        if isinstance(schema, dict):
            assert "$ref" not in schema or len(schema) == 1
        for part in schema.values() if isinstance(schema, dict) else schema:
            if isinstance(part, dict | list):
                check(part)

    check(tool(strict=True)(walk).parameters)


@pytest.mark.parametrize("strict", [True, False])
def test_recursion_without_an_end_is_refused(strict: bool) -> None:
    def walk(n: Endless) -> int:
        """Walk."""
        return 1

    with pytest.raises(ToolDefinitionError, match="Endless contains itself") as caught:
        tool(strict=strict)(walk)
    assert caught.value.code == "unsupported_schema"


@pytest.mark.parametrize(
    "annotation",
    [tuple[int, str], dict[str, object], dict[str, int], Any, object, list, list[Any], Open],
)
def test_what_strict_mode_cannot_state_is_refused(annotation: Any) -> None:
    def f(p: annotation) -> str:
        """F."""
        return ""

    with pytest.raises(ToolDefinitionError, match="tool f: in strict mode") as caught:
        tool(strict=True)(f)
    assert caught.value.code == "unsupported_schema"
    assert tool(f).parameters["required"] == ["p"]


def test_strict_mode_drops_what_only_narrows_and_checks_it_on_arrival() -> None:
    @tool(strict=True)
    def f(s: set[int], d: Decimal, t: datetime, u: Annotated[str, Field(max_length=2)]) -> str:
        """F."""
        return ""

    found = keywords(f.parameters)
    assert not found & {"uniqueItems", "title", "maxLength"}
    assert "(?" not in json.dumps(f.parameters)
    assert f.parameters["properties"]["t"] == {"type": "string", "format": "date-time"}
    sent = {"s": [1, 1], "d": "1.10", "t": "2020-01-01T00:00:00Z", "u": "xyz"}
    assert refuse(f, json.dumps(sent)).fields is not None


def test_arguments_arrive_as_the_objects_that_were_declared() -> None:
    @tool
    def f(
        c: Color, m: Literal["x", "y"], t: datetime, d: Decimal, s: set[int], p: Point, z: SecretStr
    ) -> str:
        """F."""
        return ""

    assert accept(
        f, c="red", m="x", t="2020-01-01T00:00:00Z", d="1.10", s=[1, 2], p={"x": 1}, z="pw"
    ) == {
        "c": Color.RED,
        "m": "x",
        "t": datetime(2020, 1, 1, tzinfo=UTC),
        "d": Decimal("1.10"),
        "s": {1, 2},
        "p": Point(1),
        "z": SecretStr("pw"),
    }


def test_a_decimal_from_a_json_number_is_what_was_written() -> None:
    @tool
    def f(d: Decimal) -> str:
        """F."""
        return ""

    assert f.parse('{"d": 0.1}') == {"d": Decimal("0.1")}


@pytest.mark.parametrize("number", [9007199254740993, -(2**63), 10**40])
def test_large_integers_are_exact(number: int) -> None:
    assert accept(add, a=number, b=0)["a"] == number


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("2.5", 2.5), ("1e3", 1000.0)])
def test_a_float_takes_any_number(text: str, value: float) -> None:
    parsed = scale.parse(f'{{"x": {text}}}')
    assert parsed == {"x": value}
    assert isinstance(parsed, dict)
    assert type(parsed["x"]) is float


def test_a_whole_number_written_as_a_float_is_an_integer() -> None:
    parsed = add.parse('{"a": 3.0, "b": 1e2}')
    assert parsed == {"a": 3, "b": 100}
    assert isinstance(parsed, dict)
    assert type(parsed["a"]) is int


@pytest.mark.parametrize("value", ["x", "1", 0.1, 9007199254740992.5e3, True, None, [1], {"a": 1}])
def test_nothing_else_becomes_an_integer(value: object) -> None:
    error = refuse(add, json.dumps({"a": value, "b": 1}))
    assert error.fields is not None
    assert set(error.fields) == {"a"}
    assert "a:" in error.message


@pytest.mark.parametrize(
    ("each", "text"),
    [(order, '{"line": "{\\"sku\\": \\"x\\"}"}'), (order, '{"line": {"sku": "x"}, "tags": "[1]"}')],
)
def test_json_inside_a_string_is_not_unpacked(each: Tool, text: str) -> None:
    assert refuse(each, text).fields


def test_a_string_argument_that_holds_json_stays_a_string() -> None:
    assert accept(save, text="[1,2]") == {"text": "[1,2]"}


def test_a_raw_newline_in_a_string_is_kept() -> None:
    assert save.parse('{"text":"l1\nl2"}') == {"text": "l1\nl2"}


def test_a_number_does_not_become_a_string() -> None:
    assert refuse(save, '{"text": 5}').fields == {"text": "Input should be a valid string"}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"a": 1, "b": 2, "note": "x"}', {"note": "unknown argument"}),
        ('{"a": 1}', {"b": "missing"}),
        ("{}", {"a": "missing", "b": "missing"}),
    ],
)
def test_unknown_and_missing_arguments_are_named(text: str, fields: dict[str, str]) -> None:
    error = refuse(add, text)
    assert error.fields == fields
    assert all(name in error.message for name in fields)


def test_a_nested_fault_is_named_by_its_path() -> None:
    error = refuse(order, '{"line": {"sku": "x", "count": "many", "colour": "red"}}')
    assert error.fields == {
        "line.count": "Input should be a valid integer",
        "line.colour": "unknown argument",
    }


def test_a_model_that_allows_extra_keys_gets_them() -> None:
    @tool
    def f(o: Open) -> str:
        """F."""
        return ""

    assert accept(f, o={"a": 1, "z": 2})["o"].model_extra == {"z": 2}
    assert refuse(f, '{"o": {"a": 1}, "z": 2}').fields == {"z": "unknown argument"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not one JSON object"),
        ("{'a': 1, 'b': 2}", "not one JSON object"),
        ('```json\n{"a":1,"b":2}\n```', "not one JSON object"),
        ('{"a":1,"b":5}{"a":2,"b":9}', "Extra data"),
        ('{"a": ', "not one JSON object"),
        ("null", "must be one JSON object"),
        ("[1, 2]", "must be one JSON object"),
        ('"{}"', "must be one JSON object"),
        ('{"a": NaN, "b": 1}', "NaN is not JSON"),
        ('{"a": -Infinity, "b": 1}', "-Infinity is not JSON"),
        ('{"a": 1e999, "b": 1}', "too large"),
        ('{"a": 1, "b": 1, "b": 100000}', "given twice"),
        ('{"a": {"x": 1, "x": 2}, "b": 1}', "given twice"),
        ('{"a": ' + "9" * 5000 + ', "b": 1}', "digits"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + ', "b": 1}', "nested"),
        ('{"a": ' + "[" * 500 + "]" * 500 + ', "b": 1}', "nested"),
        ('{"text": "' + "x" * 1_000_000 + '"}', "longer than"),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_text_that_is_not_one_exact_json_object_is_refused(text: str, says: str) -> None:
    error = refuse(save if "text" in text else add, text)
    assert says in error.message
    assert error.fields is None


def _check_pin(value: str) -> str:
    raise ValueError(f"{value} is not a pin")


class Guarded(BaseModel):
    pin: str

    @field_validator("pin")
    @classmethod
    def check(cls, value: str) -> str:
        return _check_pin(value)


@pytest.mark.parametrize("annotation", [Guarded, int, Color, datetime, Cat | Dog, list[int]])
def test_a_refusal_never_repeats_the_value(annotation: Any) -> None:
    def f(p: annotation) -> str:
        """F."""
        return ""

    for sent in ("hunter2", {"pin": "hunter2", "kind": "hunter2"}, ["hunter2"]):
        error = refuse(tool(f), json.dumps({"p": sent}))
        assert "hunter2" not in error.model_dump_json()
    text = '{"animal": {"kind": "hunter2"}}'
    assert refuse(pet, text).fields == {"animal": "must be one of 'cat', 'dog'"}


def test_a_validator_that_crashes_is_a_refusal() -> None:
    class Broken(BaseModel):
        a: int

        @field_validator("a")
        @classmethod
        def check(cls, value: int) -> int:
            raise RuntimeError("hunter2")

    @tool
    def f(p: Broken) -> str:
        """F."""
        return ""

    error = refuse(f, '{"p": {"a": 1}}')
    assert "RuntimeError" in error.message
    assert "hunter2" not in error.message


def test_a_flood_of_faults_makes_a_short_message() -> None:
    error = refuse(add, json.dumps({f"{'k' * 1000}{n}": 1 for n in range(500)}))
    assert len(error.message) < 4_000


def test_types_that_are_local_to_a_function_are_found() -> None:
    class Local(BaseModel):
        a: int

    @tool
    def bare(p: Local) -> Optional[Local]:  # noqa: UP045 - the old spelling works as well
        """F."""
        return p

    @tool(timeout=1)
    def with_options(p: list[Local]) -> None:
        """F."""

    assert accept(bare, p={"a": 1}) == {"p": Local(a=1)}
    assert accept(with_options, p=[{"a": 1}]) == {"p": [Local(a=1)]}


def test_variables_of_a_caller_elsewhere_do_not_change_what_an_annotation_means() -> None:
    source = "def f(p: 'Thing') -> str:\n    'F.'\n    return ''\n"
    module: dict[str, Any] = {"Thing": int, "__name__": "elsewhere"}
    exec(source, module)
    Thing = str  # noqa: F841, N806
    assert tool(module["f"]).parameters["properties"]["p"] == {"type": "integer"}


def test_an_annotation_that_cannot_be_resolved_is_refused_by_name() -> None:
    def f(p: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
        """F."""
        return ""

    with pytest.raises(ToolDefinitionError, match=r"tool f: .*Missing") as caught:
        tool(f)
    assert caught.value.code == "unsupported_signature"


@pytest.mark.parametrize("annotation", [Callable[[], int], type("Plain", (), {})])
def test_a_type_without_a_schema_is_refused(annotation: Any) -> None:
    def takes(p: annotation) -> str:
        """F."""
        return ""

    with pytest.raises(ToolDefinitionError, match="tool takes: a parameter") as caught:
        tool(takes)
    assert caught.value.code == "unsupported_schema"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(st.text(st.characters(codec=None)))
def test_any_argument_text_is_accepted_or_refused(text: str) -> None:
    for each in (add, save, order, strict_order, pet):
        assert isinstance(each.parse(text), dict | ToolErrorInfo)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "text", "line", "n", "animal", "kind"]), _JSON))
def test_any_json_object_is_accepted_or_refused(arguments: dict[str, Any]) -> None:
    for each in (add, save, order, strict_order, pet):
        assert isinstance(each.parse(json.dumps(arguments)), dict | ToolErrorInfo)
