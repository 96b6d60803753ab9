"""Checks a final answer before it is final."""

from __future__ import annotations

import re

from pydantic import JsonValue, ValidationError

from runner.agents import Agent

FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*)\n\s*```\s*\Z", re.DOTALL)


def check_answer(agent: Agent, text: str) -> tuple[JsonValue, str | None]:
    """The answer as JSON, and what is wrong with it (None: it is final)."""
    if agent.output is None:
        return text, None
    fenced = FENCE.match(text)
    try:
        value = agent.output.validate_json(fenced.group(1) if fenced else text)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'answer'}: {each['msg']}" for each in found[:10]
        )
        return None, (
            f"Your answer doesn't match the required JSON schema ({problems}). "
            "Answer again with the corrected JSON alone."
        )
    except Exception as error:  # noqa: BLE001 - a validator of the user's may raise anything
        return None, (
            f"Your answer was refused ({type(error).__name__}). Answer again, in the required form."
        )
    answer: JsonValue = agent.output.dump_python(value, mode="json")
    return answer, None
