"""Ask a server for its health: `python -m millrace.rpc.probe ADDRESS [SERVICE] [--timeout SECONDS]`.

For health checks of containers. Without SERVICE it asks for the process (liveness), with a full service name for that
service (readiness). Exit codes: 0 serving, 1 not serving, 2 usage, 3 no such service, 5 no answer.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.errors import MillraceError, NotFoundError
from millrace.rpc.access import ClientAccess
from millrace.rpc.channel import CHANNEL_OPTIONS
from millrace.rpc.status import from_rpc_error
from millrace.telemetry.settings import parse_address


def probe(address: str, service: str = "", *, timeout_s: float = 3.0, access: ClientAccess | None = None) -> bool:
    """Ask a server for the health of `service` (its full name; empty is the process), and return whether it serves.

    `access` is by default that of calls between the services. UnavailableError if nobody answers within `timeout_s`,
    NotFoundError if the server does not know the service.
    """
    with _open(address, ClientAccess.internal_from_environ() if access is None else access) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            response = stub.Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failure = from_rpc_error(error, to=address, timeout_s=timeout_s)
            if isinstance(failure, NotFoundError):
                raise NotFoundError(f"{address} has no service {service!r}", reason="SERVICE_NOT_FOUND") from error
            raise failure from error
    return response.status == health_pb2.HealthCheckResponse.SERVING


def _open(address: str, access: ClientAccess) -> grpc.Channel:
    """Return a synchronous channel to `address`, with TLS if `access` has it. It shows no token: health needs none."""
    credentials = access.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, *access.channel_options()])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: print SERVING or NOT_SERVING, or an error; return 0, 1 or the error's exit code.

    `argv` is by default that of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m millrace.rpc.probe", description="Ask a server for its health.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("service", nargs="?", default="", help="full service name; the process itself if absent")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="default 3")
    parser.add_argument("--plain", action="store_true", help="plain text, whatever the environment says")
    options = parser.parse_args(argv)
    try:
        parse_address(options.address)
    except ValueError as error:
        parser.error(f"ADDRESS {options.address!r} {error}")
    try:
        access = ClientAccess.plain() if options.plain else None
        is_serving = probe(options.address, options.service, timeout_s=options.timeout, access=access)
    except MillraceError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print("SERVING" if is_serving else "NOT_SERVING")
    return 0 if is_serving else 1


if __name__ == "__main__":
    sys.exit(main())
