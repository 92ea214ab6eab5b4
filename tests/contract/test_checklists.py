"""What AGENTS.md and CONTRIBUTING.md ask of every new fault point and RPC, as far as it can be read from the tree."""

from __future__ import annotations

import re
from pathlib import Path

from millrace.telemetry.faults import Point

ROOT = Path(__file__).parents[2]


def _tests() -> str:
    return "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))


def test_every_fault_point_is_struck_by_a_test() -> None:
    tests = _tests()
    assert not [point.name for point in Point if not re.search(rf"\b{point.name}\b", tests)]


def test_every_rpc_is_called_by_a_test() -> None:
    rpcs = {name for p in (ROOT / "proto").rglob("*.proto") for name in re.findall(r"\brpc (\w+)", p.read_text())}
    tests = _tests()
    assert len(rpcs) > 10
    assert not [name for name in sorted(rpcs) if not re.search(rf"\b{name}\b", tests)]


def test_every_public_rpc_has_a_client_method() -> None:
    rpcs = re.findall(r"\brpc (\w+)", (ROOT / "proto/millrace/v1/run_service.proto").read_text())
    client = "\n".join(p.read_text() for p in (ROOT / "services/millrace/client").rglob("*.py"))
    assert rpcs
    assert not [name for name in rpcs if f".{name}(" not in client and f".{name}," not in client]
