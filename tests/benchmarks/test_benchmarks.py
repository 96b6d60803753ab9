"""The benchmarks' own code, at the smallest scale, so that no part breaks unseen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.capacity import Costs, write_capacity
from benchmarks.load import Load, answer, make_history, plan_calls, read_load
from benchmarks.parts import cost, faults, slots, speed
from benchmarks.plots import draw, ticks
from benchmarks.report import DOCS, write_report
from benchmarks.rigs import bare_hop, obvious, ours
from benchmarks.tables import Bar, Plot, Size, Table, load_results, save_results
from benchmarks.without import leave_out
from runner.scripts import load_script

TINY = Size(0.01)

TABLE = Table(
    title="Some",
    about="Of some.",
    columns=["calls", "a", "b"],
    rows=[[1, 1.5, 3.0], [8, 4.0, 40.0]],
    bars=[Bar("a ratio", 0.5, 0.4)],
    plot=Plot("calls", ["a", "b"], "ms", logarithmic=True),
)

ON_ONE_STAGE = [
    "overhead",
    "throughput",
    "fanout",
    "history",
    "many",
    "slots",
    "parked",
    "cancel",
    "cpu",
    "commands",
]
"""Parts that can be tried on workers that others have used."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One of each contestant, for all parts: starting workers is what takes time."""
    folder = tmp_path_factory.mktemp("rigs")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        mine = stack.enter_context(ours(folder / "ours", started=False))
        mine.start("steps", concurrency=4)
        mine.start("tools", concurrency=2)
        theirs = stack.enter_context(obvious(folder / "obvious"))
        hop = stack.enter_context(bare_hop(folder / "hop"))
        mine.workers.wait_until_ready()
        patch.setattr(mine, "start", lambda *_, **__: None)
        patch.setattr(cost, "PATIENCE", 0.7)
        for part in (speed, slots, cost, faults):
            for name, rig in (("ours", mine), ("obvious", theirs), ("bare_hop", hop)):
                if hasattr(part, name):
                    patch.setattr(part, name, lambda *_, rig=rig, **__: nullcontext(rig))
        yield


@pytest.mark.parametrize("name", ON_ONE_STAGE)
def test_each_part_measures_something(name: str, stage: None, tmp_path: Path) -> None:
    table = command.PARTS[name](TINY, tmp_path)
    assert table.rows
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert all(bar.measured == bar.measured for bar in table.bars), "not a number"
    numbers = [cell for row in table.rows for cell in row if isinstance(cell, int | float)]
    assert name in ("overhead", "throughput", "slots", "cancel") or any(numbers)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["workers", "recovery", "memory", "watching", "fire", "peers"])
def test_each_part_that_needs_workers_of_its_own_does_too(name: str, tmp_path: Path) -> None:
    assert command.PARTS[name](TINY, tmp_path).rows


def test_every_part_is_tried_here() -> None:
    alone = {"workers", "recovery", "memory", "watching", "fire", "peers"}
    assert {*ON_ONE_STAGE, *alone} == set(command.PARTS)


# --- the load ----------------------------------------------------------------------------------


def test_the_model_asks_for_as_many_turns_and_calls_as_the_goal_says() -> None:
    load = Load(steps=2, calls=3)
    history: list[dict[str, Any]] = [
        *make_history(4),
        {"role": "user", "content": load.goal},
    ]
    numbers = []
    while "tool_calls" in (reply := answer(history)):
        history.append(reply)
        for call in reply["tool_calls"]:
            numbers.append(json.loads(call["function"]["arguments"])["n"])
            history.append({"role": "tool", "tool_call_id": call["id"], "content": "x"})
    assert reply["content"] == "done"
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert read_load(history) == (load, 2)
    assert plan_calls(load, 2) == []


def test_what_is_left_out_of_a_script_is_gone_and_the_rest_stays() -> None:
    prelude = leave_out("events", "prelude", load_script("commit_step").text)
    assert "XADD" not in prelude
    assert prelude.startswith("local function drop()")
    body = load_script("commit_step").body
    assert leave_out("trace", "commit_step", body).count("drop(") >= 1
    assert leave_out("trace", "commit_step", body).replace("drop(", "") != body


# --- what is written ---------------------------------------------------------------------------


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    save_results({"some": TABLE}, tmp_path / "results.json")
    assert load_results(tmp_path / "results.json") == {"some": TABLE}
    assert load_results(tmp_path / "none.json") == {}


def test_a_bar_says_which_way_it_is_held() -> None:
    assert not TABLE.bars[0].met
    assert Bar("", 3.6, 3.5, at_least=True).met
    assert not Bar("", 3.4, 3.5, at_least=True).met


def test_a_plot_has_a_line_for_each_column() -> None:
    drawn = draw(TABLE)
    assert drawn.count("<polyline") == 2
    assert ticks([1, 40], logarithmic=True) == [1, 2, 5, 10, 20]
    assert ticks([0.5, 3.2], logarithmic=False) == [1, 2, 3]


def test_the_documents_hold_what_was_measured_last(tmp_path: Path) -> None:
    for name in ("benchmarks.md", "capacity.md"):
        text = (DOCS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text, encoding="utf-8")
    results = load_results()
    write_report({name: results[name] for name in command.PARTS if name in results}, tmp_path)
    write_capacity(results, tmp_path)
    for path in tmp_path.rglob("*.*"):
        written = (DOCS / path.relative_to(tmp_path)).read_text(encoding="utf-8")
        assert path.read_text(encoding="utf-8") == written, "run: make bench PART=--render"


def test_twice_the_runs_need_about_twice_of_everything() -> None:
    costs = Costs(
        steps_ms=2,
        tools_ms=6,
        redis_ms=1,
        step_kb=30,
        flight_mb=0.2,
        steps_mb=60,
        tools_mb=50,
        child_mb=20,
        parked_kb=8,
    )
    small, large = costs.plan(1_000), costs.plan(2_000)
    assert large[1] == pytest.approx(2 * float(small[1]), rel=0.01)
    assert float(large[2]) == pytest.approx(2 * float(small[2]), rel=0.05)
    assert small[1] == 181.8
    assert small[2] == 29  # 909 model calls at once, 32 in each
    assert small[3] == 455  # 727 calls a second for half a second each, and a fifth to spare
