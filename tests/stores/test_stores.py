"""Real S3 servers: each is refused with what it lacks, or carries a run whose log passes the audit."""

import datetime
import json
import os
import re
import time
from pathlib import Path

import pytest

from millrace.storage.clean_up import RetryPolicy
from millrace.storage.s3 import S3Store
from millrace_testing.repository import REPOSITORY
from millrace_testing.stores.servers import BUCKET, CEPH, SERVERS, origin, serving
from millrace_testing.stores.trials import judged, outcomes, put_s, shortened

RESULTS = REPOSITORY / "outputs" / "stores"


@pytest.mark.stores
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*SERVERS, CEPH])
def test_a_server_carries_a_run_or_is_refused_by_reason(
    name: str, warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = SERVERS[name].refused if name in SERVERS else ""
    place = tmp_path / "server"
    place.mkdir()
    with serving(name, place) as (endpoint, keys):
        env = {"AWS_ACCESS_KEY_ID": keys[0], "AWS_SECRET_ACCESS_KEY": keys[1], "AWS_REGION": "us-east-1"}
        for variable, value in env.items():
            monkeypatch.setenv(variable, value)
        store = S3Store(bucket=BUCKET, prefix="trials", endpoint=endpoint)
        store.ensure_bucket()
        quick = RetryPolicy(deadline_s=10, max_attempts=3)
        one_s = put_s(S3Store(bucket=BUCKET, prefix="trials", endpoint=endpoint, retry=quick))
        reason, message, (self_test_s, all_s) = judged(store)
        tried = outcomes(S3Store(bucket=BUCKET, prefix="trials", endpoint=endpoint, retry=quick), tmp_path)
        began = time.monotonic()
        env["MILLRACE_STORE_URL"] = f"s3://{BUCKET}/runs?endpoint={endpoint}"
        if reason:
            code, output = warm.attempt(*_RL, warm.rl_toml, "--max-steps", "3", "--name", "refused", env=env)
            run = f"refused after {time.monotonic() - began:.0f} s"
        else:
            run, code, output = _train(warm, env)
    title, (source, version) = SERVERS[name].title if name in SERVERS else "Ceph's gateway", origin(name)
    RESULTS.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    row = {"title": title, "from": source, "version": version, "date": today, "reason": reason, "run": run}
    row |= {
        "message": shortened(message),
        "put_s": one_s,
        "load": os.getloadavg()[0],
        "self_test_s": self_test_s,
        "all_s": all_s,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(row | {"tried": tried}, indent=1))
    if refused:
        assert re.search(refused, message), message
        assert code and re.search(refused, output) and "Traceback" not in output, output
    else:
        assert not reason, message
        assert not code, output
        needed = {what: problem for what, problem in tried.items() if what != "compare-and-swap" and problem}
        assert not needed, needed


_RL = ("-m", "millrace.cli", "rl", "@")


def _train(warm, env: dict[str, str]) -> tuple[str, int, str]:
    """Train three steps and audit them; returns what to say of it, the exit code of the audit and what it printed."""
    began = time.monotonic()
    summary, _ = warm.train("--max-steps", "3", "--name", "accepted", env=env)
    assert summary["steps"] == 3
    took_s = time.monotonic() - began
    audit = ("-m", "millrace.cli", "run", "audit", "accepted", "--deep", "--store", env["MILLRACE_STORE_URL"])
    code, output = warm.attempt(*audit, env=env)
    return f"{took_s:.0f} s, audit {'clean' if not code else 'not clean'}", code, output
