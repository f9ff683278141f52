"""Settings that hold for every test and for the processes that tests start."""

import os

# One thread each: two runs of tests whose operations wait for each other's threads take a hundred times
# as long on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")  # no windows
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models come from configurations, never from a hub
