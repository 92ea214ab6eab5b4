"""Who may import whom: the layers, and no torch or verifiers outside their services."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lint_imports(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *args]
    environ = {**os.environ, "PYTHONPATH": str(cwd / "services")}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.computes
def test_the_import_contracts_hold() -> None:
    done = lint_imports(ROOT, "--config", str(ROOT / "pyproject.toml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.computes
def test_the_contracts_see_a_sideways_import(tmp_path: Path) -> None:
    rooms = [
        "cli",
        "local",
        "client",
        "orchestrator",
        "env_server",
        "inference",
        "trainer",
        "tinker",
        "readers",
        "readers/audit",
        "readers/dashboard",
        "readers/exports",
        "readers/repair",
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
    for module in ("files", "vocabulary"):
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


@pytest.mark.computes
def test_the_command_line_starts_without_heavy_imports() -> None:
    code = (
        "import sys, millrace.cli.main;"
        "heavy = {'torch', 'grpc', 'pydantic', 'numpy', 'transformers', 'boto3', 'redis', 'google.protobuf'};"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == []


_ONLY_WITH = """
import importlib, importlib.abc, pkgutil, sys
from importlib import metadata
from packaging.requirements import Requirement

def plain(name):
    return name.lower().replace("_", "-")

def installed_with(extra):
    seen, todo = set(), [("millrace", ""), ("millrace", extra)]
    while todo:
        name, extra = todo.pop()
        if (plain(name), extra) in seen:
            continue
        seen.add((plain(name), extra))
        for each in map(Requirement, metadata.requires(name) or []):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                todo += [(each.name, one) for one in ("", *each.extras)]
    return {name for name, _ in seen}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        owners = {plain(each) for each in OWNERS.get(name.partition(".")[0], ())}
        if owners and not owners & HAVE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

HAVE, OWNERS = installed_with(sys.argv[1]), metadata.packages_distributions()
sys.meta_path.insert(0, Absent())
for package in sys.argv[2:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.rpartition(".")[2] not in {"__main__", "fine_tune", "orchestrator_bench"}:  # two start services
            importlib.import_module(module.name)
"""
"""Imports each module of packages as if nothing were installed but the base dependencies and those of one extra."""


@pytest.mark.computes
@pytest.mark.parametrize(
    "extra, packages",
    [
        ("client", "millrace.config millrace.client millrace.cli.commands millrace.cli.session"),
        ("orchestrator", "millrace.orchestrator millrace.runlog"),
        ("orchestrator", "millrace.readers.audit millrace.readers.dashboard millrace.readers.exports"),
    ],
)
def test_a_package_imports_with_what_its_extra_installs(extra: str, packages: str) -> None:
    command = [sys.executable, "-c", _ONLY_WITH, extra, *packages.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
