"""What docs/web.md says is what the routes do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner.models import Frozen
from runner.record import CallInfo
from tasks import Client, RunDetails, RunPage
from tasks.feed import KEPT
from web import bodies, create_app
from web.errors import KNOWN, ErrorInfo, ErrorType
from web.routes import create_router

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "web.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- test: run -->\n```python\n(.*?)```", TEXT, re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def spans(cell: str) -> set[str]:
    return {span.rstrip("?") for span in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return create_app(Client()).openapi()


def test_every_route_is_told_and_no_other(described: dict[str, Any]) -> None:
    routes = {
        f"{method.upper()} {path}"
        for path, methods in described["paths"].items()
        for method in methods
    }
    assert {cells[0].strip("`") for cells in rows("Routes")} == routes


def test_every_body_is_told_with_its_keys(described: dict[str, Any]) -> None:
    for cells in rows("Routes"):
        method, path = cells[0].strip("`").split(" ")
        body = described["paths"][path][method.lower()].get("requestBody")
        if body is None:
            continue
        schema = body["content"]["application/json"]["schema"]
        [name] = re.findall(r"schemas/(\w+)", str(schema))
        model: type[Frozen] = getattr(bodies, name)
        told = set(re.findall(r"`(\w+)\??`", cells[1]))
        assert told == set(model.model_fields), path
        needed = set(re.findall(r"`(\w+)`", cells[1]))
        assert needed == {key for key, field in model.model_fields.items() if field.is_required()}


@pytest.mark.parametrize("model", [RunDetails, RunPage, CallInfo, bodies.WholeResult])
def test_every_answer_is_told_with_its_keys(model: type[Frozen]) -> None:
    told = [spans(cells[2]) for cells in rows("Routes")]
    assert any(set(model.model_fields) <= each for each in told)


def test_every_error_is_told_with_its_status() -> None:
    told = {cells[0].strip("`"): int(cells[1]) for cells in rows("Errors")}
    assert set(told) == set(ErrorType)
    assert all(told[word] == status for _, status, word in KNOWN)
    [shape] = re.findall(r'\{"error": \{([^}]*)\}\}', TEXT)
    assert set(re.findall(r'"(\w+)"', shape)) == set(ErrorInfo.model_fields)


def test_its_numbers_are_those_of_the_code() -> None:
    assert f"last {KEPT} events" in TEXT
    assert create_router.__kwdefaults__ is not None
    assert f"whenever {create_router.__kwdefaults__['heartbeat']:g} seconds" in TEXT


@pytest.mark.parametrize("block", BLOCKS)
def test_its_examples_run(block: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(block, "docs/web.md", "exec"), names)
    assert {"app", "ask"} & names.keys()
    if "app" in names:
        assert "/agents/runs" in names["app"].openapi()["paths"]


def test_it_has_examples() -> None:
    assert len(BLOCKS) == 2
