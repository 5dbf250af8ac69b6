"""Imported first by studies that use the tests' helpers: a script finds only what stands beside it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
