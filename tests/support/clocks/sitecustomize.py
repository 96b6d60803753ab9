"""For a worker whose clock is wrong: its folder on PYTHONPATH makes Python read this at its start.

What the tests write down themselves takes the true time, from `time.clock_gettime`.
"""

import os
import time

OFF = float(os.environ.get("CELERIAC_TEST_CLOCK_OFF", "0"))

true_time, true_time_ns = time.time, time.time_ns

time.time = lambda: true_time() + OFF
time.time_ns = lambda: true_time_ns() + int(OFF * 1_000_000_000)
