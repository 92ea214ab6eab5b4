"""A GPU that was asked for and is not usable ends the start."""

from pathlib import Path

import pytest
import torch

from millrace.errors import InvalidSpecError, InvalidStateError
from millrace.trainer.gang.distributed import choose_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this is what a machine without a GPU says")


def test_nothing_asked_for_and_nothing_there_is_the_cpu(tmp_path: Path):
    assert choose_device({}, gpu=tmp_path / "none") == torch.device("cpu")


def test_a_gpu_that_was_asked_for_is_never_a_cpu(tmp_path: Path):
    driver = tmp_path / "version"
    driver.write_text("535.1\n")
    with pytest.raises(InvalidStateError) as failed:
        choose_device({"MILLRACE_TRAINER_DEVICE": "cuda"}, gpu=tmp_path / "none", driver=driver)
    assert failed.value.reason == "GPU_UNUSABLE"
    assert "driver: 535.1" in str(failed.value) and f"torch {torch.__version__}" in str(failed.value)
    assert "MILLRACE_TRAINER_DEVICE=cpu" in str(failed.value.remedy)


def test_a_gpu_that_is_there_is_asked_for_unless_it_is_hidden_or_torch_is_made_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gpu = tmp_path / "nvidia0"
    gpu.touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device({}, gpu=gpu).type == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(InvalidStateError):
        choose_device({}, gpu=gpu)
    assert choose_device({"CUDA_VISIBLE_DEVICES": ""}, gpu=gpu).type == "cpu"
    assert choose_device({"MILLRACE_TRAINER_DEVICE": "cpu"}, gpu=gpu).type == "cpu"


def test_another_word_is_refused():
    with pytest.raises(InvalidSpecError):
        choose_device({"MILLRACE_TRAINER_DEVICE": "gpu"})
