"""One more inference replica beside a `ChaosStack`'s own: joins by registration, has a store and faults of its own."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.errors import MillraceError, UnavailableError
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.local.directory import free_ports
from millrace.local.redis import die_with_parent
from millrace.rpc.channel import call, open_channel
from millrace.rpc.probe import probe
from millrace.telemetry import faults
from millrace.telemetry.faults import Action, Fault, Point
from millrace_testing.chaos import loop as chaos_loop
from millrace_testing.chaos.logs import wait_line
from millrace_testing.chaos.run import WAITS_S
from millrace_testing.chaos.stack import PREFIX, ChaosStack

END_S = 60.0
_POLL_S = 0.05


class ExtraReplica:
    """A process of `millrace.inference.main`; started by `extra_replica`."""

    def __init__(self, chaos: ChaosStack, directory: Path) -> None:
        self._faults = directory / "faults"
        self._link = directory / "store" / PREFIX
        self._link.parent.mkdir(parents=True)
        self._faults.mkdir()
        store: str = chaos.where["store"]
        if store.startswith("file://"):
            self._real = Path(store.removeprefix("file://")) / PREFIX
            self.set_store(is_there=True)
            store = self._link.parent.as_uri()
        port, http_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self.log = directory / "inference.log"
        with self.log.open("a") as output:
            self.process: subprocess.Popen[str] = chaos.workplace.popen(
                *("-m", "millrace.inference.main"),
                stdout=output,
                preexec_fn=die_with_parent,
                env={
                    "MILLRACE_ORCHESTRATOR": chaos.where["addresses"]["orchestrator"],
                    "MILLRACE_STORE_URL": store,
                    "MILLRACE_LISTEN": self.address,
                    "MILLRACE_HTTP_LISTEN": f"127.0.0.1:{http_port}",
                    "MILLRACE_MAX_NUM_SEQS": "64",
                    "MILLRACE_DRAIN_S": "0",
                    "MILLRACE_GRACE_S": "3",
                    faults.VARIABLE: str(self._faults),
                },
            )

    def set_store(self, *, is_there: bool) -> None:
        """Take the object store away from this replica alone, or give it back; only one that is a directory."""
        if is_there:
            self._link.symlink_to(self._real)
        else:
            self._link.unlink()

    def hang_next_apply(self, seconds: float) -> Path:
        """Make the replica's next update hang in the middle for that long; return the record of it."""
        return faults.arm(self._faults, Fault(point=Point.INFERENCE_MID_APPLY, action=Action.SLEEP, seconds=seconds))

    def die_in_next_download(self) -> None:
        """Make the replica kill itself once it has read the first objects of its next version."""
        faults.arm(self._faults, Fault(point=Point.INFERENCE_MID_DOWNLOAD))

    def said(self, words: str, *, timeout_s: float = WAITS_S) -> str:
        """Wait for a line in its log that contains these words, and return the line."""
        return wait_line(self.log, words, since=0.0, timeout_s=timeout_s, alive=lambda: self.process.poll() is None)

    def wait_ready(self, *, timeout_s: float = WAITS_S) -> None:
        """Wait until the replica serves its API. The orchestrator registers it at about the same time."""
        ends = time.monotonic() + timeout_s
        while not self._answers():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}"
            assert time.monotonic() < ends, f"it does not serve after {timeout_s:g} s"
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        with contextlib.suppress(UnavailableError):
            return probe(self.address, timeout_s=2.0)
        return False

    def status(self) -> pb.PolicyStatus:
        """Return the replica's status; an empty one while it does not answer."""

        async def ask() -> pb.PolicyStatus:
            async with open_channel(self.address) as channel:
                stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
                return (await call(stub.GetPolicyStatus, pb.GetPolicyStatusRequest(), timeout_s=2.0)).status

        try:
            return chaos_loop.call(ask())
        except MillraceError:
            return pb.PolicyStatus()

    def wait_version(self, version: int, *, timeout_s: float = WAITS_S) -> None:
        """Wait until it serves that version or a newer one."""
        ends = time.monotonic() + timeout_s
        while not ((status := self.status()).has_version and status.version >= version):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}"
            assert time.monotonic() < ends, f"version {version} is not served after {timeout_s:g} s: {status}"
            time.sleep(_POLL_S)

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)


@contextmanager
def extra_replica(chaos: ChaosStack, name: str) -> Iterator[ExtraReplica]:
    """Run a second replica during the block; it has ended afterwards whatever the test does."""
    replica = ExtraReplica(chaos, chaos.directory / f"{name}-{os.urandom(3).hex()}")
    try:
        yield replica
    finally:
        if replica.process.poll() is None:
            replica.process.kill()
            replica.process.wait(END_S)
