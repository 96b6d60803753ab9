"""Reads what Redis and the kernel count: bytes, commands, memory, CPU time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import redis

from support.fleet import raw_client

TICKS = os.sysconf("SC_CLK_TCK")


def count_bytes(url: str) -> int:
    """Bytes that the server has read and written since its start."""
    info = read_info(url, "stats")
    return int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"])


def used_memory(url: str) -> int:
    """Bytes that the server's data takes."""
    return int(read_info(url, "memory")["used_memory"])


def read_info(url: str, section: str) -> dict[str, float]:
    client = raw_client(url)
    found: dict[str, float] = client.info(section)
    client.close()
    return found


@contextlib.contextmanager
def listening(url: str) -> Iterator[Counter[str]]:
    """Counts the commands that clients send meanwhile, by name; a script counts once."""
    heard: Counter[str] = Counter()
    client = raw_client(url)
    with client.monitor() as monitor:

        def listen() -> None:
            with contextlib.suppress(redis.RedisError, OSError, ValueError):
                for entry in monitor.listen():
                    if entry["client_type"] != "lua":
                        heard[entry["command"].split(" ")[0].upper()] += 1
                        if entry["command"] == "ECHO over":
                            return

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        yield heard
        client.echo("over")
        listener.join(10)
    del heard["ECHO"]
    client.close()


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int(_stat(int(folder.name))[1])
                children.setdefault(parent, []).append(int(folder.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def own_memory(pids: Iterable[int]) -> float:
    """MB that these processes hold for themselves alone: what isn't a file's."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                total += int(line.split()[1])
    return total / 1024


def shared_memory(pids: Iterable[int]) -> float:
    """MB of these processes where what several share is counted once (PSS)."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that these processes have used, in seconds."""
    return sum(sum(map(int, _stat(pid)[11:13])) for pid in pids) / TICKS


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
