"""The command line as tests start it, and what it left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from support.fleet import ROOT

PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "worker" / "entry", ROOT / "tests")))

COMMAND = [sys.executable, "-m", "celeriac"]


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> None:
        """It ended with this code and one line of error with these words in it."""
        assert (self.code, self.err.count("\n"), self.err[:17]) == (code, 1, "celeriac: error: "), (
            self
        )
        assert "Traceback" not in self.err
        assert [word for word in words if word not in self.err] == [], self.err
        assert self.out == ""


Invoke = Callable[..., Ran]
