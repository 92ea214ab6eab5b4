"""docker-compose.gpu.yml as a file, and the trainer's start as a program: no machine of the tests has a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.inference.settings import InferenceSettings

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
EXAMPLE = (ROOT / ".env.example").read_text()
VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")
SHOW = 'echo "rank $RANK of $WORLD_SIZE sees $CUDA_VISIBLE_DEVICES"'


def environment(service: str, **given: str) -> dict[str, str]:
    """Return what a service gets from these variables, as compose fills them in."""
    values: dict[str, Any] = SERVICES[service]["environment"]
    return {key: VARIABLE.sub(lambda m: given.get(m[1]) or m[2], str(value)) for key, value in values.items()}


def table() -> list[tuple[str, dict[str, str]]]:
    """Return the rows of docs/gpus.md: a machine, and the variables that it needs."""
    names = ("MILLRACE_INFERENCE_GPUS", "MILLRACE_TRAINER_GPUS", "MILLRACE_VLLM_FLAGS")
    text = (ROOT / "docs" / "gpus.md").read_text()
    _, rows = text.split("| GPUs | `" + "` | `".join(names) + "` |\n|---|---|---|---|\n")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.split("\n\n")[0].splitlines()]
    return [
        (machine, {name: said.split("`")[1].strip("'") for name, said in zip(names, row, strict=True) if said})
        for machine, *row in cells
    ]


@pytest.mark.parametrize(("machine", "given"), table(), ids=lambda part: part if isinstance(part, str) else "")
def test_each_machine_of_the_documentation_has_its_gpus_used_once(machine: str, given: dict[str, str]) -> None:
    count = int(machine.split(",")[0])
    engine, trainer = (environment(name, **given) for name in ("inference", "trainer"))
    seen = [part["CUDA_VISIBLE_DEVICES"].split(",") for part in (engine, trainer)]
    flags = InferenceSettings.from_env(engine).vllm_flags
    assert {*seen[0], *seen[1]} == {str(index) for index in range(count)}
    assert len(seen[0]) == flags.get("tensor_parallel_size", 1)
    if count == 1:
        assert flags["gpu_memory_utilization"] == 0.4
    else:
        assert not {*seen[0]} & {*seen[1]} and "gpu_memory_utilization" not in flags


def test_without_variables_there_are_two_gpus_and_no_cpu_in_silence() -> None:
    engine, trainer = environment("inference"), environment("trainer")
    assert (engine["CUDA_VISIBLE_DEVICES"], trainer["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert trainer["MILLRACE_TRAINER_DEVICE"] == "cuda"
    for service in ("inference", "trainer"):
        [device] = SERVICES[service]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_every_variable_of_the_file_is_in_the_example() -> None:
    named = set(re.findall(r"^#?([A-Z_]+)=", EXAMPLE, re.MULTILINE))
    used = {match[1] for match in VARIABLE.finditer((ROOT / "docker-compose.gpu.yml").read_text())}
    assert {"MILLRACE_TRAINER_GPUS", "MILLRACE_VLLM_FLAGS"} <= used <= named


@pytest.mark.computes
@pytest.mark.parametrize("gpus", ["1", "4,5,6"])
def test_the_trainers_container_starts_a_rank_for_each_of_its_gpus(gpus: str, tmp_path: Path) -> None:
    """The real torchrun, with a program that says who it is in place of the trainer."""
    program = tmp_path / "millrace-trainer"
    program.write_text(f"#!/bin/sh\n{SHOW}\n")
    program.chmod(0o755)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    trainer = SERVICES["trainer"]
    assert trainer["entrypoint"] == ["tini", "--", "sh", "-ec"]
    [script] = (line.replace("$$", "$") for line in trainer["command"])
    environ = {**os.environ, **environment("trainer", MILLRACE_TRAINER_GPUS=gpus), "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"
    done = subprocess.run(["sh", "-ec", script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count = len(gpus.split(","))
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of {count} sees {gpus}" for rank in range(count)]
