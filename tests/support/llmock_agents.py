"""The agents that llmock's faults are tried on: two tools with effects that a ledger records."""

from __future__ import annotations

from runner import Agent, Retry, tool
from support.agents import note

CALLS = (
    ("reserve", {"item": "A001", "pieces": 12}),
    ("charge", {"account": 7, "cents": 1250}),
)
"""The one tool step of each run: (tool, arguments)."""

LINES = ("reserve A001 12", "charge 7 1250")
"""What the ledger says once each of these has run."""

ANSWER = "Item A001 is reserved and account 7 was charged."


@tool
def reserve(item: str, pieces: int) -> str:
    """Set pieces of an item aside."""
    note(f"reserve {item} {pieces}")
    return f"reserved {pieces} of {item}"


@tool
def charge(account: int, cents: int) -> str:
    """Charge an account."""
    note(f"charge {account} {cents}")
    return f"charged {cents}"


# The waits are short for the tests' sake; that they grow is what llmock looks at.
retry = Retry(initial_delay=0.03, max_delay=1.0)

plain = Agent(name="plain", instructions="Help.", tools=[reserve, charge], model_retry=retry)
streaming = Agent(
    name="streaming",
    instructions="Help.",
    tools=[reserve, charge],
    model_retry=retry,
    stream=True,
)
