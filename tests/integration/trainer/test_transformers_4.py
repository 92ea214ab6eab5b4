"""Saved models as transformers 4 reads them: the lane `make test-models`."""

from pathlib import Path

import pytest

from millrace_testing.repository import REPOSITORY
from millrace_testing.trainer.older import ALL_BUT_VISION, CASES, EQUAL, NOT_THERE, OlderReading, compare, table

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
ABSENT = {"qwen3_5, text part", "qwen3_5_moe, text part"}


@pytest.fixture(scope="module")
def readings(transformers_4: Path, tmp_path_factory: pytest.TempPathFactory) -> list[OlderReading]:
    return list(compare(transformers_4, tmp_path_factory.mktemp("models")))


def test_transformers_4_reads_the_same_model(readings: list[OlderReading]) -> None:
    """By its class and by AutoModelForCausalLM, logits to 1e-5, with an equal tokenizer and all templates."""
    assert len(readings) == len(CASES) >= 41
    for each in readings:
        absent = each.name in ABSENT
        assert each.of_4 == (NOT_THERE if absent else EQUAL), each
        assert each.of_5 == (NOT_THERE if absent else ALL_BUT_VISION if each.name == "gemma3" else EQUAL), each


def test_the_page_is_up_to_date(readings: list[OlderReading]) -> None:
    remedy = "run: python -m millrace_testing.trainer.older .venv-transformers-4, and put it into docs/models.md"
    assert table(readings) in (REPOSITORY / "docs/models.md").read_text(), remedy
