"""Who holds a lease, read from Redis as it is stored."""

import json
from typing import NamedTuple

from millrace.runlog import RunLog


class LeaseHolder(NamedTuple):
    """What a lease says of its holder."""

    owner: str
    epoch: int
    slot: str


async def lease_holder(log: RunLog, role: str) -> LeaseHolder | None:
    """Return the holder of the lease of a role; None if nobody holds it."""
    held = await log.command(f"reading the lease of {role}", "GET", log.names.lease(role))
    if held is None:
        return None
    fields = json.loads(held)
    return LeaseHolder(fields["owner"], fields["epoch"], fields["slot"])
