"""The helper, in a worker whose store works without the protection that the environment names."""

from __future__ import annotations

import os

from support.agents import helper
from support.disarm import disarm

__all__ = ["helper"]

disarm(os.environ["CELERIAC_TEST_WITHOUT"])
