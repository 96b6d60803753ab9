"""Lets a model ask the user: its question is a call that no worker runs and a reply answers."""

from __future__ import annotations

from runner.tools import tool


@tool(idempotent=True)
def ask_user(question: str) -> str:  # noqa: ARG001 - the model fills it in
    """Ask the user for what you can't find out with the other tools, and wait for the reply.

    :param question: what you need to know, in one or two sentences
    """
    raise AssertionError("a question is answered by run.reply(), and never run")
