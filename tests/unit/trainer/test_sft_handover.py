"""Weights that a fine-tuning hands over to be evaluated."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from millrace.config.sections.sft import SFTConfig
from millrace.errors import InvalidSpecError, InvalidStateError
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.sft import checkpoints
from millrace.trainer.sft.fine_tune import run, run_sft


def make_config(example: Path, output: Path, *, steps: int = 4, **evaluation: Any) -> SFTConfig:
    evaluation = {"env": [{"id": "a"}], "interval": 2, "max_pending": 9, **evaluation}
    document: dict[str, Any] = {
        "model": {"name": str(example / "base")},
        "data": {"name": str(example / "sft.jsonl"), "batch_size": 8, "seq_len": 64},
        "optim": {"lr": 4e-3},
        "scheduler": {"type": "constant"},
        "max_steps": steps,
        "output_dir": str(output),
        "run": {"name": "sft"},
        "ckpt": {"interval": 2},
        "eval": evaluation,
    }
    return SFTConfig.model_validate(document)


def fine_tune(config: SFTConfig) -> None:
    run_sft(config, gang=Gang(), on_step=lambda _: None)


def due(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "sft" / "evals" / "due").iterdir())


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_due_weights_are_those_behind_their_step(example: Path, tmp_path: Path) -> None:
    fine_tune(make_config(example, tmp_path / "four"))
    places = tmp_path / "four" / "sft" / "evals" / "due"
    assert due(tmp_path / "four") == ["last-4", "step-0", "step-2"]
    fine_tune(make_config(example, tmp_path / "two", steps=2, interval=3, skip_first_step=True))
    assert due(tmp_path / "two") == ["last-2"]
    assert weights(places / "step-2") == weights(tmp_path / "two" / "sft" / "model")
    assert weights(places / "last-4") == weights(tmp_path / "four" / "sft" / "model") != weights(places / "step-2")
    at_first, base = (safetensors.torch.load(weights(each)) for each in (places / "step-0", example / "base"))
    assert all(torch.equal(at_first[name], base[name]) for name in base.keys() | at_first.keys())
    names = {path.name for path in (tmp_path / "four" / "sft" / "model").iterdir()}
    assert {path.name for path in (places / "step-0").iterdir()} == names


def test_what_is_made_again_is_evaluated_again_and_nothing_twice(example: Path, tmp_path: Path) -> None:
    fine_tune(make_config(example, tmp_path))
    evals = tmp_path / "sft" / "evals"
    for step in (0, 2, 4):
        (evals / f"step-{step}").mkdir()
        (evals / f"step-{step}" / "eval.json").write_text("{}")
    shutil.rmtree(evals / "due")
    shutil.rmtree(tmp_path / "sft" / "checkpoints" / "sft" / "runs" / "run" / "checkpoints" / "00000004")
    (evals / "due").mkdir()
    (evals / "due" / ".step-2.done").mkdir()  # a removal that a kill has cut off
    fine_tune(make_config(example, tmp_path))  # goes on after step 2
    assert due(tmp_path) == ["last-4"]
    assert sorted(path.name for path in evals.iterdir()) == ["begun", "due", "step-0", "step-2"]
    assert json.loads((evals / "begun").read_text()) == 2


def test_training_waits_while_too_many_are_not_evaluated(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SAY_AFTER_S", 0.0)
    places = tmp_path / "sft" / "evals" / "due"
    taken: list[str] = []
    is_over = threading.Event()

    def evaluate() -> None:
        while not is_over.wait(0.05):
            for path in [path for path in places.glob("*-*") if path.name[0] != "."][:1]:
                is_over.wait(1.0)
                taken.append(path.name)
                shutil.rmtree(path)

    evaluating = threading.Thread(target=evaluate)
    evaluating.start()
    fine_tune(make_config(example, tmp_path, max_pending=1))
    is_over.set()
    evaluating.join()
    assert [*taken, *due(tmp_path)] == ["step-0", "step-2", "last-4"]
    assert "training waits after step 2: 1 evaluations are not over (eval.max_pending)" in caplog.text
    assert "training goes on after" in caplog.text


def test_a_model_without_a_chat_template_is_refused_before_the_first_step(example: Path, tmp_path: Path) -> None:
    shutil.copytree(example / "base", tmp_path / "base")
    path = tmp_path / "base" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings))
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    config = make_config(example, tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"name": str(tmp_path / "base")})})
    with pytest.raises((InvalidSpecError, InvalidStateError), match="chat template"):
        fine_tune(config)


def test_a_trainer_alone_refuses_evaluations(example: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(make_config(example, tmp_path).resolved_json())
    with pytest.raises(InvalidSpecError, match="is played by `millrace sft`"):
        run(path)
