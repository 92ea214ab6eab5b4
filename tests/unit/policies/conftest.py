"""The store of these tests."""

from pathlib import Path

import pytest

from millrace.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")
