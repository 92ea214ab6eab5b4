"""`millrace rl @ examples/reverse_text/rl.toml --algo.preset X --dry-run` for every X."""

import json
from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace.config.filling import PRESETS

EXAMPLE = Path(__file__).parents[3] / "examples" / "reverse_text" / "rl.toml"
TEACHER = '{"name": "t", "base_url": ["http://127.0.0.1:1/v1"]}'


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dry_run_shows_what_a_preset_becomes(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = ["--orchestrator.algo.teacher", TEACHER] if preset == "opd" else []
    assert main(["rl", "@", str(EXAMPLE), "--algo.preset", preset, *teacher, "--dry-run"]) == 0
    shown = json.loads(capsys.readouterr().out)
    advantage, loss = PRESETS[preset]
    assert shown["algo"]["preset"] == preset
    assert shown["orchestrator"]["algo"]["type"] == advantage["type"]
    assert shown["trainer"]["loss"]["type"] == loss["type"]
