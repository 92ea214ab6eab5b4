"""Every family that is proved, and every model that holds something apart, is saved as a model (docs/models.md)."""

from pathlib import Path

import pytest

from millrace_testing.trainer.families import FAMILIES, MIXTURES, OTHERS
from millrace_testing.trainer.saved import round_trip


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS, *MIXTURES])
def test_what_is_saved_is_a_model(name: str, tmp_path: Path) -> None:
    assert round_trip(name, tmp_path).problems == ()
