"""`pip install millrace[client]` from a wheel, in an environment of its own: small, and without what services need."""

from pathlib import Path

import pytest

from millrace_testing.deployment import run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1300)]

SERVICES_NEED = {"torch", "transformers", "verifiers", "renderers", "redis", "boto3", "botocore", "numpy", "aiohttp"}
SERVICES_NEED |= {"fastapi", "uvicorn"}
MAX_BYTES = 100e6
MAX_PACKAGES = 20


def test_the_client_is_small(thin_client: Path) -> None:
    script = "import importlib.metadata as m; print(*(d.metadata['Name'].lower() for d in m.distributions()))"
    packages = set(run([str(thin_client / "python"), "-c", script]).split())
    assert "millrace" in packages
    assert not packages & SERVICES_NEED
    installed = [path for path in (thin_client.parent / "lib").rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in installed)
    print(f"millrace[client]: {len(packages)} packages, {size / 1e6:.0f} MB")
    assert len(packages) <= MAX_PACKAGES and size < MAX_BYTES, sorted(packages)
    assert "submit" in run([str(thin_client / "millrace"), "run", "--help"])
