"""Tests of this folder share `stack_commands.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
