"""The asynchronous client: one channel, one attribute per noun."""

from typing import Self

from millrace.client.runs import RunsClient
from millrace.rpc.access import ClientAccess
from millrace.rpc.channel import open_channel
from millrace.v1.run_service_pb2_grpc import RunServiceStub


class Client:
    """Talks to the RunService at `host:port`. Use it as an asynchronous context manager, or call `close`."""

    def __init__(self, address: str, *, access: ClientAccess | None = None) -> None:
        """InvalidSpecError if the address or a file of the access is wrong. It connects at the first call.

        `access` says whom to trust and which token to show; by default by MILLRACE_TLS_CA, MILLRACE_TOKEN_FILE,
        MILLRACE_TOKEN and the other variables of this process.
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
        """Close the channel; calls under way end with an error."""
        await self._channel.close()
