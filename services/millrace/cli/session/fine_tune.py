"""Runs the trainer's SFT as a supervised child process."""

import os
import secrets
import sys
from pathlib import Path

from millrace.cli.interrupts import Interrupts
from millrace.config.schema import SFTConfig
from millrace.processes.supervisor import ProcessSpec, Supervisor
from millrace.runlog import run_name

TRAINER = ("-m", "millrace.trainer.main", "sft", "--config")


async def fine_tune(config: SFTConfig, interrupts: Interrupts) -> int:
    """Run it to its end with its output on ours; returns its exit code. Ctrl-C stops it with all that it started."""
    name = config.run.name or run_name.make(f"sft-{Path(config.model.name).name}", secrets.token_hex(2))
    directory = Path(config.output_dir) / name
    directory.mkdir(parents=True, exist_ok=True)
    if config.run.name is None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    path = directory / "config.json"
    path.write_text(config.resolved_json())
    async with Supervisor() as supervisor:
        interrupts.on_second(supervisor.hurry.set)
        child = await supervisor.start(
            ProcessSpec(
                name="trainer",
                argv=[sys.executable, *TRAINER, str(path)],
                env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ},
                log_path=None,
            )
        )
        code = await child.exited
    return code if code >= 0 else 128 - code
