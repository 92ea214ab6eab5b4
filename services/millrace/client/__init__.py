"""The Python client of Millrace.

    async with Client("127.0.0.1:50051") as client:
        run = await client.runs.create(Path("rl.toml"))  # or a dict, or JSON text
        run = await client.runs.wait(run.name, on_note=print)
        print(state_name(run.state))  # SUCCEEDED

What it returns are the messages of `millrace.v1`; what it raises are the classes of `millrace.errors`.
"""

from millrace.client.client import Client, SyncClient
from millrace.client.runs import RunsClient
from millrace.rpc.access import ClientAccess
from millrace.runlog.run_status import is_terminal, state_name

__all__ = ["Client", "ClientAccess", "RunsClient", "SyncClient", "is_terminal", "state_name"]
