"""The figures of the example in docs/planning.md, computed anew from the config alone."""

import re
from pathlib import Path

import pytest

from millrace.config.sections.trainer import TrainerConfig
from millrace.trainer.estimate import estimate
from millrace.trainer.estimate_report import KINDS, Estimate
from millrace_testing.repository import REPOSITORY
from millrace_testing.trainer.sizes import config_of

pytestmark = pytest.mark.long  # a model of 36 blocks; `test_estimate` has what an estimate is
PAGE = REPOSITORY / "docs" / "planning.md"
ROWS = {"(left out)": None, '`mode = "full"`': {"mode": "full"}}
"""How the table names a setting of `ac`, and what it is."""
TOKENS = 16_384


@pytest.fixture(scope="module")
def estimates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Estimate]:
    directory = tmp_path_factory.mktemp("8B")
    config_of("8B").save_pretrained(directory)
    return {name: _estimate(directory, ac) for name, ac in ROWS.items()}


def _estimate(directory: Path, ac: dict[str, str] | None) -> Estimate:
    """Of a GPU without end, so that nothing is tried to make it fit."""
    model = {"name": str(directory), "seq_len": TOKENS, "lora": {"rank": 16}, "ac": ac}
    config = TrainerConfig.model_validate({"model": model, "micro_batch_tokens": TOKENS})
    return estimate(config, num_gpus=1, gpu_memory=1000, reserve=0, mfu=0.4, tflops=989)


def test_the_table_is_what_the_command_says(estimates: dict[str, Estimate]):
    section = PAGE.read_text().partition("## An example")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert header[1:] == [*KINDS, "peak"]
    assert [row[0] for row in rows] == list(ROWS)
    for name, *cells in rows:
        found = estimates[name]
        sizes = [*(found.device[kind] for kind in KINDS), found.peak]
        assert cells == [f"{size / 2**30:.2f}" for size in sizes], name


def test_the_sentences_are_true(estimates: dict[str, Estimate]):
    section = " ".join(PAGE.read_text().partition("## An example")[2].partition("\n## ")[0].split())
    speed = re.search(r"([\d,]+) tokens/s at an MFU of 40 %", section)
    parameters = re.search(r"dense model of ([\d.]+) B parameters \(36 blocks of 4096, vocabulary 151,936\)", section)
    assert speed is not None and parameters is not None
    for each in estimates.values():
        assert each.tokens_per_s is not None and f"{each.tokens_per_s:,.0f}" == speed[1]
        assert f"{(each.num_parameters - each.num_trained) / 1e9:.2f}" == parameters[1]
    plain, recomputed = estimates.values()
    assert plain.peak > 80 * 2**30 > 2 * recomputed.peak, "it needs checkpointing, and leaves half of the GPU free"
