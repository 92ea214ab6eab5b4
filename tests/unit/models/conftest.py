"""A tiny model of which tests damage copies."""

import shutil
from pathlib import Path

import pytest

from millrace_testing.model_files import make_qwen3


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen3 with a head of its own."""
    return make_qwen3(tmp_path_factory.mktemp("sound"), is_tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same with the embedding as its head."""
    return make_qwen3(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    """Return a copy of the sound model, to be damaged."""
    return shutil.copytree(sound, tmp_path / "model")
