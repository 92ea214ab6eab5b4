"""`millrace sft` as a child process: its exit code, its output, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from millrace.processes import table

# Stands in for the trainer: prints what it was given and does what the config's number of steps says.
TRAINER = """
import json, sys, time
config = json.load(open(sys.argv[-1]))
print("training", config["max_steps"], sys.argv[-1], flush=True)
if config["max_steps"] == 7:
    sys.exit(7)
if config["max_steps"] == 600:
    time.sleep(600)
"""

COMMAND = """
import sys
from millrace.cli.session import fine_tune
from millrace.cli.main import main
fine_tune.TRAINER = ("-c", {trainer!r}, "sft", "--config")
sys.exit(main(["sft", *sys.argv[1:]]))
"""


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(trainer=TRAINER), *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_output_and_exit_code_are_the_trainers(tmp_path):
    process = start(tmp_path, "--model.name", "gpt2", "--max-steps", "3", "--run.name", "warm")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "training 3 outputs/warm/config.json\n", "")
    process = start(tmp_path, "--model.name", "gpt2", "--max-steps", "7")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 7 and out.startswith("training 7 outputs/sft-gpt2-")


def test_ctrl_c_stops_the_trainer(tmp_path):
    process = start(tmp_path, "--model.name", "gpt2", "--max-steps", "600")
    assert process.stdout is not None and process.stdout.readline().startswith("training 600")
    trainer = next(
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if int(entry.name) != process.pid
        and str(tmp_path) == _cwd(entry)
        and b"--config" in (entry / "cmdline").read_bytes()
    )
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - began < 8
    assert not table.is_running(trainer)


def _cwd(entry: Path) -> str:
    try:
        return os.readlink(entry / "cwd")
    except OSError:
        return ""
