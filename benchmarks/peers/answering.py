"""How a peer's process is told to run loads: a count on a line, and the seconds they took back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def answer_counts(run: Callable[[], object]) -> None:
    """Run as many loads at once as each line asks for, and say how long they took."""
    with ThreadPoolExecutor(64) as pool:
        print("ready", flush=True)
        for line in sys.stdin:
            started = time.perf_counter()
            for each in [pool.submit(run) for _ in range(int(line))]:
                each.result()
            print(time.perf_counter() - started, flush=True)
