"""For all tests: nothing reaches for the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
