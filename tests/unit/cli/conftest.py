"""Lets the tests of this folder import `recorded_run`, which holds no tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
