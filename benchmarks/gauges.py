"""Reads what Redis and the kernel count: bytes, commands, memory, CPU time."""

from __future__ import annotations

from support.fleet import raw_client


def count_bytes(url: str) -> int:
    """Bytes that the server has read and written since its start."""
    info = read_info(url, "stats")
    return int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"])


def read_info(url: str, section: str) -> dict[str, float]:
    client = raw_client(url)
    found: dict[str, float] = client.info(section)
    client.close()
    return found
