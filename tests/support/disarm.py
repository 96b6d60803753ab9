"""Switches a protection of the store off, to show that what watches over the runs would see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from runner import store
from runner.scripts import ScriptText, load_script, script_names

Edits = Mapping[str, Mapping[str, str]]
"""Script -> patterns in its text, and what stands in their place."""

PROTECTIONS: Mapping[str, Edits] = {
    "fencing": {
        "commit_step": {r"step ~= ARGV\[2\] or epoch ~= ARGV\[3\]": "false"},
        "end_run": {r"epoch ~= ARGV\[2\] or held and \(": "false or held and ("},
        "park_step": {r"epoch ~= ARGV\[3\]": "false"},
        "release_step": {r"epoch ~= ARGV\[2\]": "false"},
        "renew_step": {r"epoch ~= ARGV\[1\]": "false"},
        "renew_call": {r"epoch ~= ARGV\[3\]": "false"},
        "retry_call": {r"epoch ~= ARGV\[4\]": "false"},
    },
    "operation ids": {
        "begin_step": {r"attempt == ARGV\[5\]": "false"},
        "begin_call": {r"attempt == ARGV\[5\]": "false"},
        "record_result": {
            r"closed_by == ARGV\[12\]": "false",
            r"recorded == ARGV\[12\]": "false",
        },
        "decide_call": {r"decided == decision": "false"},
        "send_message": {r"ARGV\[1\]\) == 1": "ARGV[1]) == 2"},
    },
    "first write wins": {
        "record_result": {r"redis\.call\('HEXISTS', KEYS\[4\], index\) == 1": "false"},
    },
    "recovery": {"claim_due": {r"return \{'OK', ids\}": "return {'OK', {}}"}},
}


def disarm(protection: str, patch: Callable[[object, str, object], None] = setattr) -> None:
    """From here on the stores of this process work without this protection.

    For those that have sent nothing yet: the texts of the scripts are read once.
    """
    edits = PROTECTIONS[protection]
    assert edits.keys() <= set(script_names())

    def load(name: str) -> ScriptText:
        text = load_script(name)
        body = text.body
        for pattern, instead in edits.get(name, {}).items():
            body, count = re.subn(pattern, instead, body)
            assert count == 1, f"{name} has {count} places like {pattern}"
        used = tuple(load(each.name) for each in text.uses)
        return replace(text, body=body, uses=used)

    patch(store, "load_script", load)
