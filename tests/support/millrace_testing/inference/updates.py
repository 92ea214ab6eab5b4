"""Asking a replica for a version as the orchestrator does: again, because one call waits for some seconds at most."""

import asyncio
from typing import Any

from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.rpc.channel import call

LIMIT_S = 90.0
_UNDER_WAY = (pb.POLICY_STATE_FETCHING, pb.POLICY_STATE_APPLYING)


async def update(stub: Any, request: pb.UpdatePolicyRequest, *, timeout_s: float = LIMIT_S) -> pb.PolicyStatus:
    """Ask for the version until the replica neither fetches nor applies it any more; return its status."""
    async with asyncio.timeout(timeout_s):
        while True:
            status = (await call(stub.UpdatePolicy, request, timeout_s=30)).status
            if status.state not in _UNDER_WAY:
                return status
