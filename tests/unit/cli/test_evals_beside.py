"""What becomes of weights that are due: figures, once each, or a warning."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.errors import CliError
from millrace.cli.evals import beside
from millrace.cli.evals.beside import EvaluationEngine, Evaluations, engine_beside
from millrace.cli.evals.prepare import PreparedEval
from millrace.cli.evals.session import RESULTS_NAME, OtherEvaluationError
from millrace.cli.interrupts import Interrupts
from millrace.config import SFTConfig
from millrace.errors import InvalidStateError, NotFoundError, UnavailableError
from millrace.local import gpus

FOUND: dict[str, Any] = {
    "reward_mean": 0.25,
    "reward_sem": None,
    "pass@1": 0.5,
    "pass@1/ci95": [0.1, 0.9],
    "num_rollouts": 7,
    "num_failed": 1,
    "truncated": 0.0,
    "turns_mean": 2.0,
    "seconds": 3.0,
    "metrics": {"length": 4.0},
}


def make_config(output: Path, **evaluation: Any) -> SFTConfig:
    evaluation = {"env": [{"id": "a"}, {"id": "b", "interval": 3}], "interval": 2, "num_examples": 5, **evaluation}
    document = {"model": {"name": "m"}, "eval": evaluation, "output_dir": str(output), "run": {"name": "tuned"}}
    return SFTConfig.model_validate(document)


class Played:
    """Stands in for a stack: notes what it is asked for, and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[PreparedEval] = []
        self.errors: dict[str, list[Exception]] = {}
        self.takes_s = 0.0

    async def __call__(self, prepared: PreparedEval, interrupts: Any, *, stream: Any) -> tuple[dict[str, Any], Path]:
        self.asked.append(prepared)
        await asyncio.sleep(self.takes_s)
        if errors := self.errors.get(prepared.name):
            raise errors.pop(0)
        data = {"envs": {env.name: FOUND for env in prepared.config.env}}
        directory = Path(prepared.config.output_dir) / prepared.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / RESULTS_NAME).write_text(json.dumps(data))
        return data, directory / RESULTS_NAME


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    stack = Played()
    monkeypatch.setattr(beside, "evaluate_here", stack)
    monkeypatch.setattr(beside, "write_eval_plot", lambda *_: True)  # matplotlib takes seconds
    return stack


def evaluate(config: SFTConfig, directory: Path, due: list[str]) -> list[str]:
    """Evaluate what is due; return what is left there."""
    assert config.eval is not None
    for name in due:
        (directory / "evals" / "due" / name).mkdir(parents=True)

    async def work() -> None:
        assert config.eval is not None
        evaluations = Evaluations(config, config.eval, directory, EvaluationEngine(inference=config.inference))
        (directory / "evals" / "begun").write_text("0\n")
        await evaluations.finish(asyncio.create_task(evaluations.run(Interrupts())))

    asyncio.run(work())
    return [path.name for path in (directory / "evals" / "due").iterdir()]


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_steps_are_played_in_order_and_written_once(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss/mean": 1.0}\n{"step": 0, "eval/a/reward/mean": 0.25}\n')
    assert evaluate(make_config(tmp_path), tmp_path, ["last-10", "step-2", "step-0"]) == []
    assert [each.name for each in played.asked] == ["step-0", "step-2", "step-10"]
    assert [[env.name for env in each.config.env] for each in played.asked] == [["a", "b"], ["a"], ["a", "b"]]
    assert {each.config.num_examples for each in played.asked} == {5}
    assert [line["step"] for line in lines_of(tmp_path)] == [2, 0, 2, 10]
    figures = lines_of(tmp_path)[2]
    assert (figures["eval/a/reward/mean"], figures["eval/a/pass@1"], figures["eval/a/metrics/length"]) == (0.25, 0.5, 4)
    assert "eval/b/reward/mean" not in figures and "eval/a/pass@1/ci95" not in figures
    said = capsys.readouterr().err
    assert "eval a  step 2  reward 0.250  (8 rollouts, 1 failed, 3.0s)" in said
    assert "3 evaluations are left" in said and "step-10" in said.splitlines()[-2]
    summary = json.loads((tmp_path / RESULTS_NAME).read_text())
    assert [each["step"] for each in summary["policies"]] == [0, 2, 10]


def test_what_fails_is_told_and_holds_up_nothing(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played.errors = {
        "step-0": [UnavailableError("no port", reason="PORT_TAKEN")],
        "step-2": [CliError("all failed", place="env-server [X]")],
        "step-4": [OtherEvaluationError("other settings")],
        "step-6": [OSError(28, "No space left on device")],
    }
    assert evaluate(make_config(tmp_path), tmp_path, ["step-0", "step-2", "step-4", "step-6"]) == []
    assert [line["step"] for line in lines_of(tmp_path)] == [4]  # begun anew
    said = capsys.readouterr().err
    assert "the evaluation of step 0 failed: no port [PORT_TAKEN]; its log: " in said
    assert "the evaluation of step 2 failed: all failed [EVAL_FAILED]; env-server [X]" in said
    assert "the evaluation of step 6 failed" in said and said.count("the evaluation of step 2 failed") == 2


def test_an_evaluation_has_a_deadline(played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played.takes_s = 30.0
    assert evaluate(make_config(tmp_path, timeout_s=0.05), tmp_path, ["step-0"]) == []
    said = capsys.readouterr().err
    assert "the evaluation of step 0 is given up after 0.05 s (eval.timeout_s) [EVAL_TIMED_OUT]" in said


def test_the_engine_gets_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    monkeypatch.setattr(gpus, "training_gpus", lambda environ: (0, 1))
    monkeypatch.setattr(gpus, "machine_gpus", lambda environ: (0, 1))
    python = {"MILLRACE_VLLM_PYTHON": "/bin/sh"}
    embedded = config.model_copy(update={"inference": config.inference.model_copy(update={"engine": "embedded"})})
    engine, training = engine_beside(embedded, {})
    assert (engine.gpus, training) == ({"inference": ()}, (0, 1))
    vllm = config.model_copy(update={"inference": config.inference.model_copy(update={"engine": "vllm"})})
    engine, training = engine_beside(vllm, python)
    assert (engine.gpus, training) == ({"inference": (0,)}, (1,))
    with pytest.raises(NotFoundError, match="MILLRACE_VLLM_PYTHON"):
        engine_beside(vllm, {"MILLRACE_VLLM_PYTHON": "/nothing"})
    monkeypatch.setattr(gpus, "training_gpus", lambda environ: (0,))
    with pytest.raises(InvalidStateError, match="a GPU that the training takes whole"):
        engine_beside(vllm, python)
    with pytest.raises(InvalidStateError, match="does not show: inference 7"):
        engine_beside(vllm.model_copy(update={"inference_gpu_ids": [7]}), python)
