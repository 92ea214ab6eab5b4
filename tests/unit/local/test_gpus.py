"""Engine and trainer of a one-machine stack get different GPUs where there are several."""

from pathlib import Path

import pytest

from millrace.errors import InvalidStateError
from millrace.local.gpus import are_shared, assign, machine_gpus, require, training_gpus
from millrace.local.stack import LocalStack, StackOptions


@pytest.mark.parametrize(
    ("count", "engine", "inference", "trainer"),
    [
        (1, 1, (0,), (0,)),
        (2, 1, (0,), (1,)),
        (4, 2, (0, 1), (2, 3)),
        (8, 4, (0, 1, 2, 3), (4, 5, 6, 7)),
        (4, 0, (), (0, 1, 2, 3)),
    ],
)
def test_defaults(count, engine, inference, trainer):
    assigned = assign(range(count), engine_size=engine)
    assert assigned == {"inference": inference, "trainer": trainer}
    assert are_shared(assigned) == (count == engine)


def test_what_is_written_counts():
    assert assign(range(4), engine_size=1, trainer=[0]) == {"inference": (1,), "trainer": (0,)}
    assert assign(range(4), engine_size=1, inference=[3]) == {"inference": (3,), "trainer": (0, 1, 2)}
    assert assign((), engine_size=1) == {}


def test_gpus_that_are_not_there_are_refused_all_at_once():
    with pytest.raises(InvalidStateError, match="inference 4; trainer 5, 6") as failed:
        require({"inference": (0, 4), "trainer": (5, 6)}, (0, 1))
    assert failed.value.reason == "GPU_UNUSABLE"


def test_the_driver_says_which_there_are(tmp_path: Path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0, GPU-aa1\necho 1, GPU-ab2\necho 2, GPU-b3\n")
    program.chmod(0o755)
    assert machine_gpus({"PATH": str(tmp_path)}) == (0, 1, 2)
    assert machine_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "2,1"}) == (2, 1)
    assert machine_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "GPU-b3, GPU-aa"}) == (2, 0)
    assert machine_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "MIG-b3"}) == ()
    assert machine_gpus({"PATH": str(tmp_path / "nowhere")}) == ()


def test_a_wheel_for_cpus_gets_none_and_neither_does_a_trainer_that_is_told_to_use_the_cpu(tmp_path: Path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0, GPU-aa1\n")
    program.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    assert training_gpus(environ, torch_version="2.13.0") == (0,)
    assert training_gpus(environ, torch_version="2.13.0+cpu") == ()
    assert training_gpus(environ | {"MILLRACE_TRAINER_DEVICE": "cpu"}, torch_version="2.13.0") == ()


def test_a_trainer_with_several_gpus_is_a_gang_that_may_not_fall_back(tmp_path: Path):
    stack = LocalStack(StackOptions(directory=tmp_path, gpus={"trainer": (2, 3)}), environ={})
    addresses = dict.fromkeys(("orchestrator", "trainer", "inference"), "127.0.0.1:1")
    spec = stack.service_spec("trainer", addresses, "127.0.0.1:2", {}, "redis://x", "file:///x")
    assert "torch.distributed.run" in spec.argv and "--nproc-per-node=2" in spec.argv and spec.module is None
    assert (spec.env["CUDA_VISIBLE_DEVICES"], spec.env["MILLRACE_TRAINER_DEVICE"]) == ("2,3", "cuda")
