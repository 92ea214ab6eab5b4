"""Who may import whom: the layers, and no torch or verifiers outside their services."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lint_imports(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *args]
    environ = {**os.environ, "PYTHONPATH": str(cwd / "services")}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=110, check=False)


def test_the_import_contracts_hold() -> None:
    done = lint_imports(ROOT, "--config", str(ROOT / "pyproject.toml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contracts_see_a_sideways_import(tmp_path: Path) -> None:
    rooms = [
        "cli",
        "local",
        "client",
        "orchestrator",
        "env_server",
        "inference",
        "trainer",
        "dashboard",
        "exports",
        "rpc",
        "runlog",
        "policies",
        "algorithms",
        "storage",
    ]
    rooms += ["models", "processes", "config", "rollouts", "telemetry", "internal", "v1"]
    package = tmp_path / "services" / "millrace"
    for room in rooms:
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").touch()
    (package / "__init__.py").touch()
    for module in ("errors", "decoding", "backoff", "race", "custom_code"):
        (package / f"{module}.py").touch()
    for module in ("adapter_files", "errors", "small_files", "vocabulary", "weight_files"):
        (package / "models" / f"{module}.py").touch()
    config = tmp_path / "pyproject.toml"
    config.write_text((ROOT / "pyproject.toml").read_text())
    clean = lint_imports(tmp_path, "--config", str(config))
    assert clean.returncode == 0, clean.stdout + clean.stderr
    (package / "runlog" / "__init__.py").write_text("import millrace.rpc\n")
    (package / "orchestrator" / "__init__.py").write_text("import torch\n")
    broken = lint_imports(tmp_path, "--config", str(config))
    assert broken.returncode == 1
    assert "layers BROKEN" in broken.stdout
    assert "torch only in the trainer and the engines BROKEN" in broken.stdout


def test_the_command_line_starts_without_heavy_imports() -> None:
    code = (
        "import sys, millrace.cli.main;"
        "heavy = {'torch', 'grpc', 'pydantic', 'numpy', 'transformers', 'boto3', 'redis', 'google.protobuf'};"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
