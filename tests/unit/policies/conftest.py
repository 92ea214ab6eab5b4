"""The store of these tests; what they share is imported by name, as test directories are no packages."""

import sys
from pathlib import Path

import pytest

from millrace.storage.local import LocalStore

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")
