"""Compose hands what the exports of a run take from the environment to the orchestrator, which alone starts them."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PASSED = re.compile(r"(OTEL|WANDB)_")


def test_the_orchestrator_gets_the_variables_of_its_exports_where_somebody_sets_them() -> None:
    """Compose passes a variable without a value on only if it is set: an empty one would be another setting."""
    passed = {name: value for name, value in SERVICES["orchestrator"]["environment"].items() if PASSED.match(name)}
    assert set(passed.values()) == {None}
    source = (ROOT / "services/millrace/readers/exports/traces.py").read_text()
    source += (ROOT / "services/millrace/readers/exports/of_run.py").read_text()
    read = set(re.findall(r'"(OTEL_[A-Z_]+[A-Z])"', source))
    for name in set(re.findall(r'_variable\("([A-Z_]+)"\)', source)):
        read |= {f"OTEL_EXPORTER_OTLP_{name}", f"OTEL_EXPORTER_OTLP_TRACES_{name}"}
    assert len(read) > 8 and read - set(passed) == set()
    assert {"WANDB_API_KEY", "WANDB_BASE_URL"} <= set(passed)


def test_nobody_else_gets_their_keys() -> None:
    for name, service in SERVICES.items():
        if name != "orchestrator":
            assert not [key for key in service.get("environment") or {} if PASSED.match(key)], name


def test_the_example_of_an_env_file_names_only_what_is_passed() -> None:
    named = set(re.findall(r"^#?((?:OTEL|WANDB)_\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert named and named <= set(SERVICES["orchestrator"]["environment"])
