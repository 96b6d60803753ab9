"""Every run that a test makes can be replayed, and gives the same history: asked when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner import Agent
from runner.models import RunStatus
from runner.recording import read_recording
from runner.replay import Replayed, replay
from runner.store import RunStore


@dataclass
class Tally:
    """How many runs were replayed; those that couldn't be by their reason."""

    replayed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def check_replay(store: RunStore, run_id: str, agent: Agent) -> Replayed:
    """Replay one run, which must come out the same."""
    found = replay(read_recording(store, run_id), agent)
    told = "\n".join(each.describe(show=True)[:2000] for each in found.differences)
    assert found.same, f"a replay of {run_id} went another way:\n{told}"
    return found


def replay_all(
    store: RunStore, agents: Mapping[str, Agent], *, tampered: frozenset[str] = frozenset()
) -> Tally:
    """Replay every run that has ended, but for those that a test has written into by hand."""
    tally = Tally()
    for record in store.list_runs(100_000):
        if record.status is not RunStatus.FINISHED:
            tally.skip("it runs")
        elif record.run_id in tampered:
            tally.skip("a test wrote into it")
        elif record.agent not in agents:
            tally.skip("its agent is unknown")
        else:
            found = check_replay(store, record.run_id, agents[record.agent])
            if found.hidden:
                tally.skip("redacted")
            else:
                tally.replayed += 1
    return tally
