"""The trainer's process has torch give it GPU memory in segments that grow, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

from millrace.trainer import main as trainer_main

ASK = """
import os
from millrace.trainer import main
main.prefer_expandable_segments(os.environ)
import torch
print(torch._C._accelerator_getAllocatorSettings())
"""
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("arguments", [[], ["sft", "--config", "c.json"], ["bench", "--config", "c.json"]])
def test_every_kind_of_trainer_begins_with_it(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:  # what the test sets in this process is put back after it
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    seen: list[str | None] = []
    for job in ("_worker", "_sft", "_bench"):
        monkeypatch.setattr(trainer_main, job, lambda *_, **__: seen.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    monkeypatch.setattr("millrace.processes.lifeline.hold", lambda: None)
    with pytest.raises(SystemExit) as ended:
        trainer_main.main(arguments)
    assert (ended.value.code, seen) == (0, ["expandable_segments:True"])


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_counts(name: str) -> None:
    environ = {name: "max_split_size_mb:128"}
    trainer_main.prefer_expandable_segments(environ)
    assert environ == {name: "max_split_size_mb:128"}


@pytest.mark.computes
def test_torch_reads_the_name_that_is_set() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    said = subprocess.run([sys.executable, "-c", ASK], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "expandable_segments:True"
