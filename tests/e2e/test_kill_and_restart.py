"""The whole stack is killed in the middle of a run, started again, and the run ends as if nothing had happened."""

import json
import signal
import subprocess
from collections import Counter

import pytest
from google.protobuf.json_format import MessageToDict

from millrace.internal.v1 import batch_pb2
from millrace.local.directory import free_ports


@pytest.mark.slow  # tests/chaos/test_kills.py kills each of its processes
@pytest.mark.timeout(280)
def test_kill_9_of_the_whole_stack_loses_and_repeats_nothing(warm) -> None:
    port, http_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    place = ["up", "--dir", "outputs/killed", "--listen", address, "--http-port", str(http_port)]
    submit = ["rl", "@", warm.rl_toml, "--name", "survivor", "--max-steps", "16", "--ckpt.interval", "5"]
    with warm.following(*place) as first:
        warm.read_until(first, "export MILLRACE_SERVER=")
        with warm.following(*submit, env={"MILLRACE_SERVER": address}) as client:
            warm.read_until(client, "step   8/16")
            first.send_signal(signal.SIGKILL)
            first.wait(timeout=10)
            with warm.following(*place) as second:
                warm.read_until(second, "export MILLRACE_SERVER=")
                output, _ = client.communicate(timeout=120)
                _stop(second)
    assert client.returncode == 0, output
    assert "reconnecting" in output
    summary = json.loads((warm.path / output.strip().splitlines()[-1]).read_text())
    assert summary["steps"] == 16 and summary["mismatch_kl"] <= 1e-4

    run = (warm.path / summary["checkpoint_path"]).parents[1]
    headers = [batch_pb2.BatchHeader.FromString(path.read_bytes()) for path in sorted(run.glob("batches/*.pb"))]
    assert [header.step for header in headers] == list(range(17)), "16 batches and the closing header"
    assert len({header.writer_epoch for header in headers}) == 2, "a second orchestrator continued"
    resolved = Counter(item.ordinal for header in headers for item in header.resolutions)
    assert max(resolved.values()) == 1, MessageToDict(headers[-1])
    assert sorted(resolved) == list(range(len(resolved))), "no ordinal is lost"
    versions = [json.loads(path.read_text())["version"] for path in run.glob("policies/*/manifest.json")]
    assert sorted(versions) == list(range(17)), "every version was published once"


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
