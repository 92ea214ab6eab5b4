"""An S3 after a proxy that injects faults."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.storage.clean_up import RetryPolicy
from millrace.storage.s3 import S3Store
from millrace_testing.chaos.fault_proxy import FaultProxy

MakeStore = Callable[[RetryPolicy | None], S3Store]
BUCKET = "millrace-faults"


@pytest.fixture(scope="package")
def endpoint_with_bucket(s3_endpoint: str) -> str:
    """Return moto's S3 server with an empty bucket."""
    with pytest.MonkeyPatch.context() as environ:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environ.setenv(name, "test")
        S3Store(bucket=BUCKET, endpoint=s3_endpoint, region="us-east-1").ensure_bucket()
    return s3_endpoint


@pytest.fixture
def proxy(endpoint_with_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Yield a proxy in front of moto's S3 server, without faults yet; its bucket exists."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    with FaultProxy(endpoint_with_bucket) as running:
        yield running


@pytest.fixture
def make_store(proxy: FaultProxy) -> MakeStore:
    """Return opens stores after the proxy, all below one prefix of their own."""
    prefix = f"t{os.urandom(6).hex()}"

    def make(retry: RetryPolicy | None = None) -> S3Store:
        return S3Store(bucket=BUCKET, prefix=prefix, endpoint=proxy.endpoint, region="us-east-1", retry=retry)

    return make


@pytest.fixture
def faulty_store(make_store: MakeStore) -> S3Store:
    """Return a store after the proxy that tries eight times."""
    return make_store(RetryPolicy(deadline_s=20, max_attempts=8))


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A filesystem of its own with 4 MiB, most of which a ballast file takes up."""

    path: Path
    ballast: Path

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, *, leave_bytes: int) -> None:
        """Leave so much room."""
        with self.ballast.open("wb") as file:
            file.write(bytes(self.free_bytes() - leave_bytes))

    def make_room(self) -> None:
        """Give back all but what objects take."""
        self.ballast.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Yield a real filesystem that can be filled; skipped where this process may not mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "millrace-test", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this process may not mount a tmpfs (needs root outside a locked-down container)")
    try:
        yield SmallDisk(path, path / "ballast")
    finally:
        subprocess.run(["umount", str(path)], check=True)
