"""A function's signature as a JSON Schema, and a model's argument text as its keyword arguments.

The rule: what the schema tells the model and what is accepted from it are the same thing. Nothing
is coerced with a loss, and no error repeats a value, since arguments may be secret.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema
from typing_extensions import TypedDict

from runner.errors import ToolDefinitionError
from runner.models import ToolErrorInfo, ToolErrorType

MAX_ARGUMENT_BYTES = 1_000_000
MAX_DIGITS = 1_000
MAX_FIELDS = 20
MAX_PATH_CHARS = 100
EXACT_FLOAT = 2**53

_CORE_ERRORS = frozenset(get_args(core_schema.ErrorType))
_REFS = "#/$defs/"

# What strict mode can state; every other keyword only narrows further, and is checked on arrival.
_STRICT_KEYWORDS = {
    *("$defs", "$ref", "additionalProperties", "anyOf", "const", "description", "enum", "format"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf", "pattern"),
    *("items", "maxItems", "minItems", "properties", "required", "type"),
}
_STRICT_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
)
_JSON_TYPES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_STRICT_REFUSED = ("prefixItems", "patternProperties", "allOf", "not", "if")

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*")
_GOOGLE_ENTRY = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s+(.+)")
_SPHINX_ENTRY = re.compile(r"\s*:param(?:\s+[^:]+?)?\s+(\w+):\s*(.+)")


# --- from a function to its schema -------------------------------------------------------------


def resolve_annotations(
    function: Callable[..., Any], name: str, caller: FrameType
) -> dict[str, Any]:
    """The annotations of `function` as objects, also where they are strings or name local types."""
    try:
        plain = inspect.unwrap(getattr(function, "__func__", function))
        # The caller's variables count only where the function was written there too.
        local = dict(caller.f_locals) if caller.f_globals is plain.__globals__ else {}
        for variable, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                local[variable] = cell.cell_contents
        return get_type_hints(plain, localns=local, include_extras=True)
    except Exception as error:
        raise ToolDefinitionError(
            f"tool {name}: its annotations can't be resolved ({type(error).__name__}: {error});"
            " define or import every type before the tool, outside of `if TYPE_CHECKING`",
            code="unsupported_signature",
        ) from error


def split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """A docstring as its description, and what it says of each argument.

    Reads `:param x: ...` and Google's `Args:`; both leave the description.
    """
    kept: list[str] = []
    about: dict[str, str] = {}
    in_arguments = False
    last = ""
    for line in text.splitlines():
        indented = line.startswith((" ", "\t"))
        if not indented and (section := _SECTION.fullmatch(line)):
            in_arguments = section[1] in ("Args", "Arguments", "Parameters")
        elif line.strip() and not indented:
            in_arguments = False
        if not in_arguments:
            if entry := _SPHINX_ENTRY.fullmatch(line):
                about[entry[1]] = entry[2].strip()
            else:
                kept.append(line)
        elif entry := _GOOGLE_ENTRY.fullmatch(line.strip()):
            last = entry[1]
            about[last] = entry[2].strip()
        elif indented and line.strip() and last:
            about[last] += " " + line.strip()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip(), about


def make_adapter(annotation: Any, name: str, what: str) -> TypeAdapter[Any]:
    """A validator for `annotation`, or `unsupported_schema` where pydantic can't make one."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        adapter.rebuild(raise_errors=True)
    except (PydanticUserError, NameError, TypeError, RecursionError) as error:
        # The first line only: pydantic's advice goes on for pages.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ToolDefinitionError(
            f"tool {name}: {what} can't be described to a model: {reason}",
            code="unsupported_schema",
        ) from error
    return adapter


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a tool accepts: `schema` is what the model is told, `parse` what is done with its text.

    `forbid_extra` is false where a model among the parameters says itself that it allows them.
    """

    schema: dict[str, Any]
    strict: bool
    adapter: TypeAdapter[Any]
    loose: dict[str, Any]
    forbid_extra: bool

    def parse(self, text: str) -> dict[str, Any] | ToolErrorInfo:
        """Keyword arguments for the function, or an `INVALID_ARGUMENT` that repeats no value."""
        try:
            given = load_object(text)
            if self.strict:
                _drop_nulls(given, self.loose, self.loose.get("$defs", {}))
            # As JSON, since a date, a set or an enum may then be strict and still come from text.
            accepted: dict[str, Any] = self.adapter.validate_json(
                json.dumps(given, ensure_ascii=False).encode(),
                strict=True,
                extra="forbid" if self.forbid_extra else None,
            )
        except ValidationError as error:
            return describe_invalid(error)
        except ArgumentError as error:
            return _refuse(str(error))
        except UnicodeEncodeError:
            return _refuse("the arguments hold a lone surrogate: half of a character")
        except RecursionError:
            return _refuse("the arguments are nested too deeply")
        except Exception as error:  # noqa: BLE001 - a user's validator may raise anything
            return _refuse(f"the arguments can't be checked ({type(error).__name__})")
        return accepted


def build_arguments(
    parameters: Mapping[str, inspect.Parameter],
    annotations: Mapping[str, Any],
    *,
    name: str,
    strict: bool,
    about: Mapping[str, str],
) -> Arguments:
    """The schema and the validator for the parameters that a model fills in."""
    fields: dict[str, Any] = {}
    for parameter, declared in parameters.items():
        annotation = annotations[parameter]
        if parameter in about and not _has_description(annotation):
            annotation = Annotated[annotation, Field(description=about[parameter])]
        optional = declared.default is not inspect.Parameter.empty
        fields[parameter] = NotRequired[annotation] if optional else annotation
    # A TypedDict, so that any parameter name goes and a default stays the function's own business.
    make_typed_dict: Any = TypedDict  # mypy knows it only with its keys written out
    described = make_typed_dict("Arguments", fields)
    described.__pydantic_config__ = ConfigDict(extra="forbid")
    adapter = make_adapter(described, name, "a parameter")
    try:
        raw = adapter.json_schema()
    except (PydanticUserError, RecursionError) as error:
        reason = (str(error).strip().splitlines() or ["it never ends"])[0]
        raise ToolDefinitionError(
            f"tool {name}: a parameter has no JSON schema: {reason}", code="unsupported_schema"
        ) from error
    loose = _tidy(raw, name=name, strict=False)
    for parameter, declared in parameters.items():
        if isinstance(declared.default, str | int | float | bool):
            _note_default(loose["properties"], parameter, declared.default)
    schema = _tidy(raw, name=name, strict=True) if strict else loose
    _require_an_end(schema, name)
    return Arguments(
        schema=schema,
        strict=strict,
        adapter=adapter,
        loose=loose,
        forbid_extra=not _allows_extra(raw),
    )


def _note_default(properties: dict[str, Any], parameter: str, default: Any) -> None:
    if parameter in properties and not (isinstance(default, float) and not math.isfinite(default)):
        value = getattr(default, "value", default)  # a member of a StrEnum or an IntEnum
        properties[parameter] = {**properties[parameter], "default": value}


def _has_description(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and any(
        isinstance(extra, FieldInfo) and extra.description for extra in get_args(annotation)[1:]
    )


def _tidy(schema: Any, *, name: str, strict: bool) -> Any:
    """`schema` without generated titles, closed to unknown keys; in strict mode, only what
    servers that compile a schema to a grammar can take, or `unsupported_schema`.
    """
    if not isinstance(schema, dict):
        return schema

    def tidy(part: Any) -> Any:
        return _tidy(part, name=name, strict=strict)

    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        match keyword:
            case "title":
                continue
            case "properties" | "$defs" | "patternProperties":
                result[keyword] = {key: tidy(part) for key, part in value.items()}
            case "anyOf" | "oneOf" | "allOf" | "prefixItems":
                key = "anyOf" if keyword == "oneOf" and strict else keyword
                result[key] = [tidy(part) for part in value]
            case "items" | "additionalProperties" | "not" | "propertyNames":
                result[keyword] = tidy(value)
            case _:
                result[keyword] = deepcopy(value)
    if "properties" in result:
        result.setdefault("additionalProperties", False)
    return _make_strict(result, name) if strict else result


def _check_strict(schema: Mapping[str, Any], name: str) -> None:
    for keyword in _STRICT_REFUSED:
        if keyword in schema:
            kind = "a tuple" if keyword == "prefixItems" else f"the schema keyword {keyword!r}"
            raise _no_strict(name, f"{kind} can't be stated; use a model with named fields")
    if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
        raise _no_strict(name, "a dict with open keys can't be stated; use a model")
    if schema.get("type") == "array" and not schema.get("items"):
        raise _no_strict(name, "a list needs the type of its items, e.g. list[str]")
    if not schema.keys() & {"type", "anyOf", "$ref", "enum", "const"}:
        raise _no_strict(name, "a parameter or field of any type can't be stated; name its type")


def _make_strict(schema: dict[str, Any], name: str) -> dict[str, Any]:
    _check_strict(schema, name)
    if "enum" in schema and "type" not in schema:  # as for Literal["a", None]
        schema["type"] = sorted({_JSON_TYPES[type(value)] for value in schema["enum"]})
    if schema.get("format") not in _STRICT_FORMATS:
        schema.pop("format", None)
    if "(?" in schema.get("pattern", ""):  # look-around, as in pydantic's pattern for a Decimal
        del schema["pattern"]
    result = {key: value for key, value in schema.items() if key in _STRICT_KEYWORDS}
    if "properties" in result:
        required = schema.get("required", [])
        result["properties"] = {
            key: part if key in required else _make_nullable(part)
            for key, part in result["properties"].items()
        }
        result["required"] = list(result["properties"])
    if "$ref" in result and len(result) > 1:
        # Nothing may stand beside a $ref; to copy its target here would never end if recursive.
        result = {"anyOf": [{"$ref": result.pop("$ref")}], **result}
    return result


def _no_strict(name: str, reason: str) -> ToolDefinitionError:
    return ToolDefinitionError(
        f"tool {name}: in strict mode {reason}, or leave strict out", code="unsupported_schema"
    )


def _make_nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if _accepts_null(schema):
        return schema
    branches = schema.get("anyOf") if schema.keys() <= {"anyOf", "description"} else None
    if branches is None:
        branches = [{key: part for key, part in schema.items() if key != "description"}]
    result: dict[str, Any] = {"anyOf": [*branches, {"type": "null"}]}
    if "description" in schema:
        result["description"] = schema["description"]
    return result


def _accepts_null(schema: Mapping[str, Any]) -> bool:
    """Whether null is a value of `schema`'s own; a schema that states nothing takes anything."""
    if "anyOf" in schema or "oneOf" in schema:
        return any(_accepts_null(part) for part in schema.get("anyOf", schema.get("oneOf")) or ())
    if "enum" in schema:
        return None in schema["enum"]
    kind = schema.get("type")
    if kind is None:
        return not schema.keys() & {"$ref", "const", "allOf"} or schema.get("const", "") is None
    return kind == "null" or (isinstance(kind, list) and "null" in kind)


def _allows_extra(schema: Any) -> bool:
    """Whether a model among the parameters is declared with `extra="allow"`."""
    if isinstance(schema, list):
        return any(_allows_extra(part) for part in schema)
    if not isinstance(schema, dict):
        return False
    own = "properties" in schema and schema.get("additionalProperties", False) is not False
    return own or any(_allows_extra(part) for part in schema.values())


def _require_an_end(schema: dict[str, Any], name: str) -> None:
    """Refuse a type that needs itself to be filled in first: no finite value satisfies it."""
    definitions: dict[str, Any] = schema.get("$defs", {})
    finite: set[str] = set()

    def ends(part: Any) -> bool:
        if not isinstance(part, dict):
            return True
        if "$ref" in part:
            return str(part["$ref"]).removeprefix(_REFS) in finite
        for choice in ("anyOf", "oneOf"):
            if choice in part:
                return any(ends(branch) for branch in part[choice])
        if part.get("minItems", 0) > 0 and not ends(part.get("items")):
            return False
        properties = part.get("properties", {})
        return all(ends(properties.get(key)) for key in part.get("required", ()))

    while grown := {key for key, part in definitions.items() if key not in finite and ends(part)}:
        finite |= grown
    if endless := sorted(definitions.keys() - finite):
        raise ToolDefinitionError(
            f"tool {name}: {endless[0]} contains itself without an end, so no call could ever"
            " fill it in; make the inner field optional or a list",
            code="unsupported_schema",
        )


# --- from a model's text to arguments ----------------------------------------------------------


class ArgumentError(ValueError):
    """Argument text that isn't one well-formed JSON object; the message repeats none of it."""


def load_object(text: str) -> dict[str, Any]:
    """Read `text` as exactly one JSON object, exactly: what JSON can't carry is an `ArgumentError`.

    A raw newline inside a string is taken as it is; whole-numbered floats become ints.
    """
    if len(text) > MAX_ARGUMENT_BYTES or len(text.encode("utf-8", "replace")) > MAX_ARGUMENT_BYTES:
        raise ArgumentError(f"the arguments are longer than {MAX_ARGUMENT_BYTES} bytes")
    try:
        value = DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(
            f"the arguments are not one JSON object: {error.msg} at character {error.pos}"
        ) from None
    if not isinstance(value, dict):
        raise ArgumentError("the arguments must be one JSON object")
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ArgumentError(f"the key {_shorten(key)} is given twice")
        result[key] = value
    return result


def _build_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ArgumentError(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def _build_float(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ArgumentError("a number is too large")
    # JSON has one kind of number, and some servers write every integer as 3.0.
    return int(value) if value.is_integer() and abs(value) < EXACT_FLOAT else value


def _refuse_constant(word: str) -> Any:
    raise ArgumentError(f"{word} is not JSON")


DECODER = json.JSONDecoder(
    strict=False,
    object_pairs_hook=_build_object,
    parse_int=_build_int,
    parse_float=_build_float,
    parse_constant=_refuse_constant,
)


def _drop_nulls(value: Any, schema: Any, definitions: Mapping[str, Any]) -> None:
    """In strict mode every key is required: null stands for a default, so here it goes missing."""
    schema = _choose_schema(value, schema, definitions)
    if isinstance(value, list):
        for item in value:
            _drop_nulls(item, schema.get("items"), definitions)
    if not isinstance(value, dict):
        return
    required = schema.get("required", ())
    for key in value.keys() & schema.get("properties", {}).keys():
        part = schema["properties"][key]
        if value[key] is None and key not in required and not _accepts_null(part):
            del value[key]
        else:
            _drop_nulls(value[key], part, definitions)


def _choose_schema(value: Any, schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` itself, what it refers to, or the branch of its union that `value` is meant for."""
    while isinstance(schema, dict) and "$ref" in schema:
        schema = definitions.get(str(schema["$ref"]).removeprefix(_REFS))
    if not isinstance(schema, dict):
        return {}
    for branch in schema.get("anyOf") or schema.get("oneOf") or ():
        chosen = _choose_schema(value, branch, definitions)
        if _could_be(value, chosen):
            return chosen
    return schema


def _could_be(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a branch of a union is the one meant: by its keys and its constant fields."""
    if isinstance(value, list):
        return schema.get("type") == "array"
    properties = schema.get("properties")
    if not isinstance(value, dict) or properties is None or not value.keys() <= properties.keys():
        return False
    return all(
        "const" not in part or value.get(key, part["const"]) == part["const"]
        for key, part in properties.items()
    )


# --- errors ------------------------------------------------------------------------------------


def describe_invalid(error: ValidationError) -> ToolErrorInfo:
    """An `INVALID_ARGUMENT` that names the fields."""
    fields = list_faults(error)
    if set(fields) == {""}:
        return _refuse(fields[""])
    text = "; ".join(f"{path}: {reason}" for path, reason in fields.items())
    return _refuse(f"the arguments are not valid: {text}", fields)


def list_faults(error: ValidationError) -> dict[str, str]:
    """Path to short reason, for the first `MAX_FIELDS` faults; never the value."""
    details = error.errors(include_url=False, include_input=False)
    return {_show_path(detail["loc"]): _show_reason(detail) for detail in details[:MAX_FIELDS]}


def _show_path(location: Iterable[int | str]) -> str:
    return _shorten(".".join(str(part) for part in location))


def _shorten(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_PATH_CHARS else text[: MAX_PATH_CHARS - 1] + "…"


def _show_reason(detail: ErrorDetails) -> str:
    kind = detail["type"]
    match kind:
        case "missing":
            return "missing"
        case "extra_forbidden":
            return "unknown argument"
        case "json_invalid":  # it was well-formed when it was written out for the validator
            return "the arguments are nested too deeply"
        case "union_tag_invalid":  # pydantic's message repeats the tag that was given
            return f"must be one of {detail['ctx']['expected_tags']}"
        case "value_error" | "assertion_error":  # the validator's own text may repeat the value
            return "is not valid"
    if kind not in _CORE_ERRORS:
        return "is not valid"
    # The part after the comma is the parser's, and may quote what it stumbled on.
    return detail["msg"].partition(",")[0] if "error" in detail.get("ctx", {}) else detail["msg"]


def _refuse(message: str, fields: dict[str, str] | None = None) -> ToolErrorInfo:
    return ToolErrorInfo(
        type=ToolErrorType.INVALID_ARGUMENT.value, message=message, retryable=True, fields=fields
    )
