"""The plain Celery app end to end: it starts a run, is told its end, and revokes one."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path

from runner import StopReason
from support.fleet import ROOT, Fleet, wait_for
from support.model_server import Reply, calls, final
from support.stage import by_turn, open_stage

WORKER = ("worker", "-Q", "desk", "-P", "solo")

EXAMPLE = [sys.executable, "-m", "examples.plain"]


def test_it_imports_nothing_of_ours() -> None:
    tree = ast.parse((ROOT / "examples" / "plain.py").read_text(encoding="utf-8"))
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else names_of(node))
    }
    assert not names & {"runner", "tasks", "worker", "web"}
    assert "celery" in names


def names_of(node: ast.Import) -> list[str]:
    return [each.name for each in node.names]


def begin(fleet: Fleet, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*EXAMPLE, *args],
        cwd=ROOT,
        env=plain_environ(fleet),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def plain_environ(fleet: Fleet) -> dict[str, str]:
    environ = fleet.environ | {"DESK_FOLDER": str(fleet.folder / "answers")}
    environ.pop("CELERIAC_AGENTS")
    return environ


def test_it_asks_is_told_and_withdraws(tmp_path: Path) -> None:
    answer: list[Reply] = [calls(("get_order", {"order_id": "A001"})), final("Yes, it can.")]
    with open_stage(tmp_path, agents="examples.orders") as stage:
        fleet = stage.fleet
        for name in ("steps", "tools"):
            fleet.stop(name)
        fleet.environ["CELERIAC_RESULT_BACKEND"] = fleet.redis_url
        fleet.start("steps", name="steps")
        fleet.start("tools", name="tools")
        stage.script("Can A001 be refunded?", by_turn(answer))
        stage.script("Think for long", [final("too late") | {"delay": 30}])
        with (tmp_path / "desk.log").open("wb") as log:
            desk = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "examples.plain", *WORKER],
                cwd=ROOT,
                env=plain_environ(fleet),
                stdout=log,
                stderr=log,
            )
        try:
            out, err = begin(fleet, "ask", "Can A001 be refunded?").communicate(timeout=60)
            run_id, told = out.splitlines()
            assert told == "COMPLETED: Yes, it can.", err

            asking = begin(fleet, "ask", "Think for long")
            assert asking.stdout is not None
            second = asking.stdout.readline().strip()
            fleet.wait_for(lambda: f"{second}.0" in fleet.log("steps"))
            begin(fleet, "withdraw", second).communicate(timeout=30)
            _, err = asking.communicate(timeout=30)
            assert "TaskRevokedError" in err
            cancelled = stage.client.get(second).result(timeout=5)
            assert cancelled.stop_reason is StopReason.CANCELLED

            answers = fleet.folder / "answers"
            wait_for(lambda: len(list(answers.glob("*.txt"))) == 2, explain=fleet.logs)
            assert (answers / f"{run_id}.txt").read_text() == "Yes, it can."
            assert (answers / f"{second}.txt").read_text() == "CANCELLED"
        finally:
            desk.send_signal(signal.SIGTERM)
            desk.wait(20)
