"""A run of a deployment whose services listen on wildcards and know each other by addresses of IPv6 alone."""

import os
import subprocess
import sys

import pytest

from millrace.local.redis import find_server
from millrace_testing.repository import REPOSITORY

POD = REPOSITORY / "tests" / "support" / "millrace_testing" / "pod_network.sh"
NO_NAMESPACE = 77
DEPLOYMENT = """
export OMP_NUM_THREADS=1 MILLRACE_INSECURE=1 MILLRACE_ORCHESTRATOR='[fd00::1]:50051' MILLRACE_STORE_URL="file://$PWD/store"
export MILLRACE_REDIS_URL='redis://[fd00::1]:6379/0'
mkdir store
start() { env "$@" > /dev/null 2> "log-$2" & }
"$REDIS" --bind fd00::1 --protected-mode no --save '' > log-redis &
start MILLRACE_LISTEN=0.0.0.0:50051 MILLRACE_DASHBOARD_LISTEN=0.0.0.0:8080 "$PYTHON" -m millrace.orchestrator.main
start MILLRACE_LISTEN=0.0.0.0:50052 'MILLRACE_ADVERTISE=[fd00::1]:50052' "$PYTHON" -m millrace.env_server.main
start MILLRACE_LISTEN=0.0.0.0:50053 'MILLRACE_ADVERTISE=[fd00::1]:50053' MILLRACE_HTTP_LISTEN=0.0.0.0:8000 \\
  "$PYTHON" -m millrace.inference.main
start MILLRACE_LISTEN=0.0.0.0:50054 MILLRACE_METRICS_LISTEN=0.0.0.0:9094 "$PYTHON" -m millrace.trainer.main
trap 'kill $(jobs -p); wait' EXIT
until "$PYTHON" -m millrace.rpc.probe '[fd00::1]:50051'; do sleep 1; done
unset MILLRACE_ORCHESTRATOR MILLRACE_REDIS_URL
MILLRACE_SERVER='[fd00::1]:50051' "$PYTHON" -m millrace.cli rl @ "$RUN" --max-steps 2 --name six
"$PYTHON" -m millrace.cli run audit six --deep
for page in 8080/ 9094/metrics; do
  "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)' "http://[fd00::1]:$page"
done
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_by_ipv6_alone(warm) -> None:
    names = {"PYTHON": sys.executable, "RUN": warm.rl_toml, "REDIS": str(find_server())}
    command = [str(POD), "bash", "-euc", DEPLOYMENT]
    done = subprocess.run(
        command, cwd=warm.path, env={**os.environ, **names}, capture_output=True, text=True, timeout=280
    )
    code, output = done.returncode, done.stdout + done.stderr
    if code == NO_NAMESPACE:
        pytest.skip("this machine gives no network namespace with IPv6")
    assert code == 0 and "SUCCEEDED" in output and "audit clean" in output, output
