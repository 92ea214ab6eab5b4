"""The example's base model and data, made once for all tests of the room."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

MAKE_MODEL = Path(__file__).parents[3] / "examples" / "reverse_text" / "make_model.py"


@pytest.fixture(scope="session")
def make_example() -> Callable[[Path], None]:
    """Return runs the example's make_model.py into a directory."""

    def make(directory: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["make_model.py", "--output", str(directory)])
            runpy.run_path(str(MAKE_MODEL), run_name="__main__")

    return make


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory, make_example: Callable[[Path], None]) -> Path:
    """Return the example's directory: base model and pairs."""
    directory = tmp_path_factory.mktemp("reverse-text")
    make_example(directory)
    return directory
