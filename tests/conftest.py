"""Settings that hold for every test and for the processes that tests start."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")  # no windows
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models come from configurations, never from a hub
