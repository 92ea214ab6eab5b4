"""What the log rests on with real servers in containers (the default suite has an embedded Redis and a fake S3), and
tasks of a v1 environment in containers of their own.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import redis

from millrace_testing import containers
from millrace_testing.deployment import run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

LOG = [f"tests/integration/runlog/test_runlog_{what}.py" for what in ("append", "commit", "events", "lease", "rebuild")]
TASKS = ["tests/integration/env_server/test_env_tools.py", "-k", "played_in_a_container"]
STORE = ["tests/integration/storage/test_storage_conformance.py", "-k", "real"]


def passed(*arguments: str, **environ: str) -> int:
    """Return how many tests passed; AssertionError if one failed or was skipped."""
    said = run([sys.executable, "-m", "pytest", *arguments], timeout_s=900, env={**os.environ, **environ})
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", said.splitlines()[-1])}
    assert not counts.keys() & {"failed", "error", "errors", "skipped"}, said[-4000:]
    return counts["passed"]


def test_the_log_is_kept_by_a_real_redis(images: None) -> None:
    with containers.redis() as url, redis.Redis.from_url(url) as client:
        num_passed = passed(*LOG, MILLRACE_TEST_REDIS_URL=url)
        commands = client.info("commandstats")
        assert num_passed > 50 and commands["cmdstat_evalsha"]["calls"] > num_passed  # it was this server


def test_a_real_s3_server_keeps_what_the_store_promises(images: None, tmp_path: Path) -> None:
    with containers.s3(tmp_path) as variables:
        assert passed(*STORE, **variables) > 15


def test_a_v1_task_is_played_in_a_container_of_its_own(base_images: None) -> None:
    assert passed(*TASKS, MILLRACE_TEST_TASK_IMAGE="debian:bookworm-slim") == 1
