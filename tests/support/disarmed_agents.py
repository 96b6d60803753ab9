"""Agents in workers whose store works without the protection that the environment names."""

from __future__ import annotations

import os

from support.agents import attentive, helper
from support.disarm import disarm

__all__ = ["attentive", "helper"]

if protection := os.environ.get("CELERIAC_TEST_WITHOUT"):  # not where the test imports it
    disarm(protection)
