"""Checks a final answer before it is final: its form, then what the agent's validators say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from runner.agents import Agent, Draft
from runner.errors import ToolError

FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*)\n\s*```\s*\Z", re.DOTALL)

ANNOUNCEMENT = re.compile(
    r"(?:let me|let us|let's|i'll|i will|i(?:'m| am) going to|i need to|i(?:'m| am) (?=\w+ing))\s*"
    r"(?:(?:just|first|now|also|quickly|go ahead and|try to|have to|need to|take|have|do|a|another|"
    r"quick|closer|moment to)\s+){0,4}"
    r"(?:(?:check|look|search|fetch|verify|investigate|retrieve|query|review|read|find)(?:ing)?\b"
    r"(?! forward)"
    r"|see (?:if|what|whether|which)\b|see\W*$|(?:get|pull)(?:ting|ing)?(?: up)? "
    r"(?:that|this|the|these|those|your|some|more)\b(?! straight)|(?:start|begin) by \w+ing\b)"
    r"|(?:one|just a|give me a) (?:moment|second)(?:\W*$|,? please\b)|hold on\W*$|hang on\W*$"
    r"|please wait(?:\W*$| while i\b| a moment\W*$)"
    r"|(?:this|it) (?:may|will|might) take a (?:moment|second|minute|while|bit)"
    r"(?:\W*$|,|\bwhile i\b)",
    re.IGNORECASE,
)
"""How a sentence starts that only says what its speaker is about to do."""

LEAD = re.compile(
    r"\W*(?:(?:ok(?:ay)?|sure|certainly|of course|alright|great|hmm)\b\W*)?", re.IGNORECASE
)
ENDS = re.compile(r"(?<=[.!\n\u2026])\s+")
ANSWERS = re.compile(r"\?|:\s*\S|\bi need to \w+ (?:\w+ )*your?\b", re.IGNORECASE)
"""A question to the user, or what comes behind a colon: more than an announcement."""

FINDING = re.compile(r"\b(?:no|not|is|are|was|were|due)\b|n't\b|\bas \d", re.IGNORECASE)
"""A word of what was found, which is more than an announcement too."""

OPEN = re.compile(
    r"\b(?:if|whether|what|which|that|why|how|when|where|who)\b[^.!\n]*", re.IGNORECASE
)
"""What is still to be found out, up to the end of its sentence: no finding."""

MAX_ANNOUNCEMENT_CHARS = 200

MAX_FAULTS = 10
"""How many of a form's faults are told."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an answer isn't final: `check` names what refused it, `text` tells the model.

    `check` is for errors and logs: it has names of the agent's own, and nothing of the answer.
    """

    check: str
    text: str


def read_answer(agent: Agent, text: str) -> tuple[JsonValue, Fault | None]:
    """The answer as JSON, and what is wrong with its form (None: nothing)."""
    if agent.output is None:
        return text, _announced(agent, text)
    fenced = FENCE.match(text)
    try:
        value = agent.output.validate_json(fenced.group(1) if fenced else text)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'answer'}: {each['msg']}"
            for each in found[:MAX_FAULTS]
        )
        return None, Fault(
            f"output_type ({_name_fields(agent.output, error)})",
            f"Your answer doesn't match the required JSON schema ({problems}). "
            "Answer again with the corrected JSON alone.",
        )
    except Exception as error:  # noqa: BLE001 - a validator of the user's may raise anything
        name = type(error).__name__
        return None, Fault(
            f"output_type ({name})",
            f"Your answer was refused ({name}). Answer again, in the required form.",
        )
    answer: JsonValue = agent.output.dump_python(value, mode="json")
    return answer, None


def find_fault(agent: Agent, draft: Draft) -> Fault | None:
    """What is wrong with an answer of the right form."""
    if agent.evidence_required and not draft.evidence:
        return Fault(
            "evidence_required",
            "Your answer rests on nothing: no tool has found any evidence yet. "
            "Use the tools to find some, and then answer.",
        )
    for validator in agent.validators:
        try:
            fault = validator(draft)
        except ToolError as error:
            fault = str(error)
        except Exception as error:  # noqa: BLE001 - the text of it may hold a secret
            fault = f"a check of it failed with {type(error).__name__}"
        if fault:
            name = getattr(validator, "__name__", type(validator).__name__)
            return Fault(f"validator {name}", f"Your answer was not accepted: {fault}")
    return None


def _name_fields(output: TypeAdapter[Any], error: ValidationError) -> str:
    """Where the faults are, and their kinds; `*` is a key of the model's, not of the type's own."""
    own = set(_property_names(output.json_schema()))
    found = error.errors(include_url=False, include_input=False, include_context=False)
    paths = (
        ".".join(str(part) if isinstance(part, int) or part in own else "*" for part in each["loc"])
        for each in found[:MAX_FAULTS]
    )
    return ", ".join(
        f"{path or 'answer'}: {each['type']}" for path, each in zip(paths, found, strict=False)
    )


def _property_names(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, dict) else ()
        for each in schema.values():
            yield from _property_names(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _property_names(each)


def _announced(agent: Agent, text: str) -> Fault | None:
    """Whether a model with tools only says what it is about to do, as one that forgot the call."""
    said = text.strip().replace("\u2019", "'")
    if not agent.tools or len(said) > MAX_ANNOUNCEMENT_CHARS:
        return None
    if ANSWERS.search(said) or FINDING.search(OPEN.sub("", said)):
        return None
    sentences = [LEAD.sub("", each, count=1) for each in ENDS.split(said)]
    announced = [bool(ANNOUNCEMENT.match(each)) for each in sentences if each]
    if not announced or not all(announced):
        return None
    return Fault(
        "an announcement in place of an answer",
        "You said what you are about to do, which is not an answer. "
        "Call the tool now, or give the answer.",
    )
