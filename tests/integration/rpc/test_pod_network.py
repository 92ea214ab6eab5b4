"""What listens on a wildcard is reached in a cluster that has IPv6 only."""

import subprocess
import sys

import pytest

from millrace_testing.repository import REPOSITORY

POD = REPOSITORY / "tests" / "support" / "millrace_testing" / "pod_network.sh"
NO_NAMESPACE = 77
METRICS = """
import asyncio, urllib.request
from prometheus_client import CollectorRegistry
from millrace.rpc.access import ServerAccess
from millrace.rpc.metrics_server import metrics_server

def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status

async def main():
    access = ServerAccess(is_insecure=True)
    async with metrics_server("0.0.0.0:0", CollectorRegistry(), access=access) as port:
        for host in ("[fd00::1]", "[::1]", "127.0.0.1"):
            print(host, await asyncio.to_thread(get, f"http://{host}:{port}/metrics"))

asyncio.run(main())
"""


def test_a_wildcard_is_reached_by_ipv6() -> None:
    command = [str(POD), sys.executable, "-c", METRICS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == NO_NAMESPACE:
        pytest.skip("this machine gives no network namespace with IPv6")
    assert done.stdout.splitlines() == ["[fd00::1] 200", "[::1] 200", "127.0.0.1 200"], done.stderr
