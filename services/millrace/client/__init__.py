"""The Python client of Millrace.

    async with Client("127.0.0.1:50051") as client:
        run = await client.runs.create(Path("rl.toml"))  # or a dict, or JSON text
        run = await client.runs.wait(run.name, on_note=print)
        print(state_name(run.state))  # SUCCEEDED

What it returns are the messages of `millrace.v1`; what it raises are the classes of `millrace.errors`.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

from millrace.client.runs import Columns, RunConfigLike, RunsClient, RunStateLike
from millrace.rpc.access import ClientAccess
from millrace.rpc.channel import open_channel
from millrace.runlog.run_status import is_terminal, state_name
from millrace.v1 import audit_pb2, checkpoint_pb2, event_pb2, run_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace.v1.run_service_pb2_grpc import RunServiceStub

__all__ = ["Client", "ClientAccess", "RunsClient", "SyncClient", "is_terminal", "state_name"]


# The asynchronous client: one channel, one attribute per noun.


class Client:
    """A client of the RunService at `host:port`. Use it as an asynchronous context manager, or call `close`."""

    def __init__(self, address: str, *, access: ClientAccess | None = None) -> None:
        """Open a channel to the RunService at `address` (host:port), which connects at the first call.

        `access` has the trusted certificates and the token; None means those of MILLRACE_TLS_CA, MILLRACE_TOKEN_FILE,
        MILLRACE_TOKEN and the other variables of this process. Raises InvalidSpecError if the address or a file of the
        access is wrong.
        """
        self.address = address
        access = ClientAccess.public_from_environ() if access is None else access
        self._channel = open_channel(address, access=access)
        self.runs = RunsClient(RunServiceStub(self._channel), to=f"the orchestrator at {address}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls in progress end with an error."""
        await self._channel.close()


# A small synchronous facade over the asynchronous client, for scripts and notebooks without an event loop.


class SyncClient:
    """`with SyncClient("127.0.0.1:50051") as client: client.runs.list()`. Not for use inside a running event loop."""

    def __init__(self, address: str, *, access: ClientAccess | None = None) -> None:
        """Open an event loop and, on it, a channel as `Client` does; `address` is the RunService's host:port."""
        self._runner = asyncio.Runner()
        self._client = self._runner.run(_open(address, access))
        self.runs = SyncRuns(self._runner, self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel and the event loop; calls in progress end with an error."""
        self._runner.run(self._client.close())
        self._runner.close()


class SyncRuns:
    """The methods of `RunsClient`, blocking; arguments and errors are the same."""

    def __init__(self, runner: asyncio.Runner, client: Client) -> None:
        """Take the event loop that calls run on, and a client whose channel belongs to it."""
        self._runner = runner
        self._runs = client.runs

    def create(self, config: RunConfigLike, **options: Any) -> run_pb2.Run:
        """Queue a run and return it; blocks until the server has answered.

        `config` is JSON text, a dict of nested keys, a TOML file, or several files of which later ones win. `options`
        are the keyword arguments of `RunsClient.create`, such as `run_id` and `validate_only`.
        """
        return self._runner.run(self._runs.create(config, **options))

    def wait(self, name: str, **options: Any) -> run_pb2.Run:
        """Wait for a run's end and return it; raise InvalidStateError with its reason if it did not SUCCEED.

        `options` are the keyword arguments of `RunsClient.wait`: `on_note`, which is called with each state as text,
        and `timeout_s`.
        """
        return self._runner.run(self._runs.wait(name, **options))

    def get(self, name: str) -> run_pb2.Run:
        """Return the run of this name, as it is now; raise NotFoundError if there is none."""
        return self._runner.run(self._runs.get(name))

    def list(self, *, states: Sequence[RunStateLike] = (), limit: int = 0, tenant: str = "") -> Sequence[run_pb2.Run]:
        """Return runs in these states (all if none is given), newest first; at most `limit`, where 0 is no limit.

        With `tenant` only those of that tenant.
        """
        return self._runner.run(self._runs.list(states=states, limit=limit, tenant=tenant))

    def usage(self, *, tenant: str = "") -> Sequence[rs.TenantUsage]:
        """Return what runs have used, by tenant: of all that the token opens, or of one tenant."""
        return self._runner.run(self._runs.usage(tenant=tenant))

    def cancel(self, name: str, *, reason: str = "") -> run_pb2.Run:
        """Ask a run to end as CANCELLED, for a reason that its log records; return it at once, as it is before that."""
        return self._runner.run(self._runs.cancel(name, reason=reason))

    def pause(self, name: str, *, reason: str = "") -> run_pb2.Run:
        """Ask a run to stop at a step boundary, for a reason that its log records.

        Return it at once, as it is before that.
        """
        return self._runner.run(self._runs.pause(name, reason=reason))

    def resume(self, name: str, **options: Any) -> run_pb2.Run:
        """Let a paused or FAILED run go on; return it at once.

        `options` are the keyword arguments of `RunsClient.resume`: `retain_batches`, `retain_policies` and
        `request_id`.
        """
        return self._runner.run(self._runs.resume(name, **options))

    def fork(self, name: str, *, step: int, **options: Any) -> run_pb2.Run:
        """Make a new run that continues from `step` of the run `name`, and return the new run.

        `options` are the keyword arguments of `RunsClient.fork`: `run_id`, `config_json`, `labels` and `request_id`.
        """
        return self._runner.run(self._runs.fork(name, step=step, **options))

    def audit(self, name: str) -> audit_pb2.AuditReport:
        """Have the server check the promises of a run against its whole log, and return the findings."""
        return self._runner.run(self._runs.audit(name))

    def explain(self, name: str) -> rs.ExplainRunResponse:
        """Return what every service of the run waits for, longest first, and a summary."""
        return self._runner.run(self._runs.explain(name))

    def checkpoints(self, name: str) -> Sequence[checkpoint_pb2.Checkpoint]:
        """Return all checkpoints of a run, oldest first."""
        return self._runner.run(self._runs.checkpoints(name))

    def metrics(self, name: str, **options: Any) -> Columns:
        """Return a run's metrics by step as columns, for `pandas.DataFrame`.

        `options` are the keyword arguments of `RunsClient.metrics`: `names` of the metrics to return, and `on_note`.
        """
        return self._runner.run(self._runs.metrics(name, **options))

    def rollouts(self, name: str, **options: Any) -> Columns:
        """Return a run's rollouts as columns, for `pandas.DataFrame`.

        `options` are the keyword arguments of `RunsClient.rollouts`: `order_by`, `limit`, `on_note`, and filters such
        as `env="letters"`.
        """
        return self._runner.run(self._runs.rollouts(name, **options))

    def lineage(self, name: str, **options: Any) -> rs.GetLineageResponse:
        """Return what made a rollout or a policy version, and what was made from it.

        `options` are the keyword arguments of `RunsClient.lineage`: either `rollout` (its id) or `version`, and
        `on_note`.
        """
        return self._runner.run(self._runs.lineage(name, **options))

    def watch(self, name: str, *, after: str = "", **options: Any) -> Iterator[event_pb2.Event]:
        """Yield every event of a run after the cursor `after` ("": all), then new ones as they come, each when it is
        asked for.

        End after the terminal state. `options` are the keyword arguments of `RunsClient.watch`: `on_reconnect`,
        `give_up_s` and `silence_s`.
        """
        events = self._runs.watch(name, after=after, **options)

        async def step() -> event_pb2.Event:
            return await anext(events)

        async def close() -> None:
            await events.aclose()

        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield self._runner.run(step())
        finally:
            # Also where the caller leaves its loop early: the call to the server ends then.
            self._runner.run(close())


async def _open(address: str, access: ClientAccess | None) -> Client:
    """Return a client whose channel belongs to the running event loop."""
    # The channel belongs to the loop that is running when it is made.
    return Client(address, access=access)
