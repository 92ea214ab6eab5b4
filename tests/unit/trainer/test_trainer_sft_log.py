"""`[log]` of a fine-tuning config decides how its process logs."""

import json
import os
import subprocess
import sys

import pytest

from millrace.config import SFTConfig


@pytest.mark.computes
@pytest.mark.parametrize(("level", "num_lines"), [pytest.param("info", 1, marks=pytest.mark.long), ("error", 0)])
def test_level_and_json_come_from_the_config(tmp_path, level, num_lines):
    document = {
        "model": {"name": str(tmp_path / "nobody")},  # it ends right after the first line
        "output_dir": str(tmp_path / "out"),
        "log": {"level": level, "json_logging": True},
    }
    path = tmp_path / "config.json"
    path.write_text(SFTConfig.model_validate(document).resolved_json())
    done = subprocess.run(
        [sys.executable, "-m", "millrace.trainer.main", "sft", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=110,
        env={
            **os.environ,
            "MILLRACE_LOG_LEVEL": "warning",
            "MILLRACE_LOG_JSON": "0",
            "MILLRACE_LOG_FILE": str(tmp_path / "log"),
        },
    )
    assert done.returncode != 0 and "nobody" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sum(line["msg"] == "fine-tuning begins" for line in lines) == num_lines
    assert "fine-tuning begins" not in done.stderr
