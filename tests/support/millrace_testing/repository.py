"""Where the repository is, whose tests these are."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
