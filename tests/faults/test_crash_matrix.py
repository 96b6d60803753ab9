"""Killed here, then what: a process dies at each named point, and the run ends as if it hadn't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner import StopReason
from runner.failpoints import Point
from support.model_server import calls, final
from support.stage import by_turn, open_stage

STEPS = ["step.begun", "step.answered", "step.committed", "step.published"]
CALLS = ["call.begun", "call.ran", "call.recorded", "call.published"]

ASKED_AGAIN = {"step.answered"}
"""The answer was there and not yet written: the model is asked once more, and no more than that."""

OUTCOME_UNKNOWN = {"call.begun", "call.ran"}
"""Nobody can know what a call did that was begun and not recorded."""


def test_every_point_is_in_the_matrix() -> None:
    assert sorted(Point) == sorted([*STEPS, *CALLS])


@pytest.mark.parametrize(
    ("point", "how"),
    # A threads worker is one process; of a prefork worker a child may die, or all of it.
    [(point, "process") for point in [*STEPS, *CALLS]] + [(point, "group") for point in CALLS],
)
def test_r10_a_kill_at_any_point_loses_nothing_and_does_nothing_twice(
    tmp_path: Path, point: str, how: str
) -> None:
    flag = tmp_path / "died"
    environ = {"CELERIAC_LEASE": "2", "CELERIAC_RENEW_EVERY": "0.5"}
    armed = environ | {"CELERIAC_FAILPOINT": f"{point}:{how}:{flag}"}
    with open_stage(tmp_path / "stage", **armed) as stage:
        run = stage.submit(
            by_turn(
                [
                    calls(("charge", {"account_id": 1, "cents": 5})),
                    calls(("add", {"a": 1, "b": 1}), ("ping", {})),
                    final("all done"),
                ]
            )
        )
        stage.fleet.wait_for(flag.exists)
        for queue in ("steps", "tools"):
            stage.fleet.start(queue, name=f"{queue}-second")

        result = run.result(timeout=30)

        assert (result.stop_reason, result.answer, result.steps) == (
            StopReason.COMPLETED,
            "all done",
            3,
        )
        answered = [each.step for each in run.events() if each.type == "model.answered"]
        assert answered == [0, 1, 2]
        asked = len(stage.requests(run))
        assert asked == (4 if point in ASKED_AGAIN else 3)
        charges = [line for line in stage.fleet.ledger if line.startswith("charge")]
        assert len(charges) == (0 if point == "call.begun" else 1)
        charged, added, pong = stage.results(run)
        if point in OUTCOME_UNKNOWN:
            assert json.loads(charged)["error"]["type"] == "OUTCOME_UNKNOWN"
        else:
            assert charged == "charged 5"
        assert (added, pong) == ("2", "pong")
