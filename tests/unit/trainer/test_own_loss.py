"""The loss and gradient of a row are its own: whichever rows share its micro-batch, and however they are laid out."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.config.sections.sft import SFTConfig
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.sft.fine_tune import SFTStep, run_sft
from millrace_testing import scaled_positions
from millrace_testing.inference import tiny

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"micro_batch_tokens": 64, "pack": {"mode": "never"}},
    "padded": {"micro_batch_tokens": 1024, "pack": {"mode": "never"}},
    "packed": {"micro_batch_tokens": 1024, "pack": {"mode": "always"}},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of each kind; seven rows of 24 tokens, which is their border, and one of 46."""
    directory = tmp_path_factory.mktemp("own-loss")
    for kind in ("longrope", "dynamic"):
        scaled_positions.model_of(kind).save_pretrained(directory / kind)
        tiny.tiny_tokenizer().save_pretrained(directory / kind)
    answers = ["ab"] * 7 + ["ab" * 12]
    rows = [{"prompt": "q", "completion": answer} for answer in answers]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def losses(inputs: Path, output: Path, kind: str, layout: str) -> list[float]:
    """Return loss, gradient norm and validation loss of two steps."""
    data = {"name": str(inputs / "rows.jsonl"), "batch_size": 8, "seq_len": 64, "shuffle": False}
    document = {
        "model": {"name": str(inputs / kind)},
        "data": data,
        "val": {"data": {"name": data["name"]}, "interval": 1, "eval_on_start": True},
        "optim": {"lr": 1e-3, "type": "sgd"},
        "max_steps": 2,
        "output_dir": str(output / layout),
        **LAYOUTS[layout],
    }
    steps: list[SFTStep] = []
    run_sft(SFTConfig.model_validate(document), gang=Gang(), on_step=steps.append)
    return [number for step in steps for number in (step.loss, step.grad_norm, step.val_loss or 0.0)]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rows_on_both_sides_of_a_border_are_their_own(kind: str, inputs: Path, tmp_path: Path) -> None:
    alone = losses(inputs, tmp_path, kind, "alone")
    for layout in ("padded", "packed"):
        assert losses(inputs, tmp_path, kind, layout) == pytest.approx(alone, rel=1e-4), layout
