"""What an environment's process inherits: foreign code gets neither the log's password nor the store's keys."""

from pathlib import Path

import pytest

from millrace.env_server.supervisor import WorkerProcess, worker_environ
from millrace.internal.v1 import env_service_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

OURS = {
    "MILLRACE_REDIS_URL": "redis://:hunter22@127.0.0.1:1/0",
    "MILLRACE_STORE_URL": "s3://bucket?endpoint=http://127.0.0.1:1",
    "MILLRACE_ORCHESTRATOR": "127.0.0.1:1",
    "MILLRACE_LISTEN": "127.0.0.1:0",
    "MILLRACE_PREFIX": "tenant",
    "AWS_ACCESS_KEY_ID": "hunter23",
    "AWS_SECRET_ACCESS_KEY": "hunter24",
    "AWS_SESSION_TOKEN": "hunter25",
    "AWS_PROFILE": "hunter26",
    "MILLRACE_KEY_TEACHER": "hunter27",  # only the env-server itself asks the teacher
}
# The reaper finds processes by their stack id, the worker reads how to log, and the rest is the environment's.
THEIRS = {
    "MILLRACE_STACK_ID": "s1",
    "MILLRACE_LOG_LEVEL": "WARNING",
    "MILLRACE_LOG_JSON": "1",
    "JUDGE_API_KEY": "theirs",
    "HF_HOME": "/nowhere",
}


async def test_placement_and_store_credentials_are_withheld() -> None:
    assert worker_environ({**OURS, **THEIRS}) == THEIRS


async def test_a_real_worker_does_not_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**OURS, **THEIRS}.items():
        monkeypatch.setenv(name, value)
    env = env_service_pb2.EnvSpec(name="r", id="reverse-text", args_json='{"num_train": 4, "num_eval": 2}')
    worker = await WorkerProcess.spawn(env, name="environ")
    try:
        loaded = await worker.loaded
        inherited = Path(f"/proc/{worker.process.pid}/environ").read_bytes().decode().split("\0")
    finally:
        await worker.close()
    assert loaded.train.num_tasks == 4, "it works without them"
    assert {f"{name}={value}" for name, value in THEIRS.items()} <= set(inherited)
    assert "hunter2" not in "".join(inherited)
    assert not {line.partition("=")[0] for line in inherited} & OURS.keys()
