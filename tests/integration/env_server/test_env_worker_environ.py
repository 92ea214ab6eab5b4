"""What an environment's process inherits: foreign code gets no key of ours, no path of ours, no open file of ours."""

import json
import os
import stat
from pathlib import Path

import pytest

from millrace.env_server.isolation.inherited import PASS_VARIABLE, is_ours, worker_environ
from millrace.env_server.workers.starter import WorkerStarter
from millrace.env_server.workers.worker_process import WorkerProcess
from millrace.internal.v1.play_pb2 import EnvSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

OURS = {
    "MILLRACE_REDIS_URL": "redis://:hunter22@127.0.0.1:1/0",
    "MILLRACE_STORE_URL": "s3://bucket?endpoint=http://127.0.0.1:1",
    "MILLRACE_ORCHESTRATOR": "127.0.0.1:1",
    "MILLRACE_LISTEN": "127.0.0.1:0",
    "MILLRACE_PREFIX": "tenant",
    "MILLRACE_SPOOL_DIR": "/var/lib/hunter2/spool",
    "MILLRACE_SCRATCH_DIR": "/var/lib/hunter2/scratch",
    "MILLRACE_ANYTHING": "hunter20",
    "AWS_ACCESS_KEY_ID": "hunter23",
    "AWS_SECRET_ACCESS_KEY": "hunter24",
    "AWS_SESSION_TOKEN": "hunter25",
    "AWS_PROFILE": "hunter26",
    "GOOGLE_APPLICATION_CREDENTIALS": "/hunter2/key.json",
    "AZURE_CLIENT_SECRET": "hunter2",
    "KUBERNETES_SERVICE_HOST": "hunter2",
    "MILLRACE_REDIS_PORT_6379_TCP": "tcp://hunter2",
    "REDISCLI_AUTH": "hunter2",
    "SSH_AUTH_SOCK": "/hunter2/agent",
    "DOCKER_HOST": "tcp://hunter2",
    "WANDB_API_KEY": "hunter2",
    "MILLRACE_STACK_PIPE": "hunter27",
    "MILLRACE_STACK_LOCK": "hunter28",
    "GITHUB_TOKEN": "hunter2",
    "BROKER": "redis://:hunter22@127.0.0.1:1/0",  # by its value
    "OLDPWD": "/var/lib/hunter2/spool",
    "SOME_CACHE": "/var/lib/hunter2/scratch/cache",
    "MILLRACE_KEY_TEACHER": "hunter27",  # only the env-server itself asks the teacher
}
# The reaper finds processes by their stack id, the worker reads how to log, and the rest is the environment's.
THEIRS = {
    "MILLRACE_STACK_ID": "s1",
    "MILLRACE_STACK_PROCESS": "s1/env-server/1",
    "MILLRACE_LOG_LEVEL": "WARNING",
    "MILLRACE_LOG_JSON": "1",
    "JUDGE_API_KEY": "theirs",
    "OPENAI_API_KEY": "theirs",
    "HF_HOME": "/nowhere",
    "HTTPS_PROXY": "http://proxy:1",
    "SERVICE_PORT": "1",
}


async def test_placement_and_store_credentials_are_withheld() -> None:
    assert worker_environ({**OURS, **THEIRS}) == THEIRS


async def test_with_a_list_nothing_else_passes() -> None:
    environ = {**OURS, **THEIRS, "PATH": "/bin", "LC_ALL": "C", PASS_VARIABLE: "JUDGE_*, AWS_PROFILE"}
    kept = worker_environ(environ).keys()
    assert kept == {"PATH", "LC_ALL", "HTTPS_PROXY", "HF_HOME", "JUDGE_API_KEY", *(THEIRS.keys() & OURS.keys())} | {
        "MILLRACE_STACK_ID",
        "MILLRACE_STACK_PROCESS",
        "MILLRACE_LOG_LEVEL",
        "MILLRACE_LOG_JSON",
    }


async def test_which_variables_no_run_may_name_as_a_key() -> None:
    assert is_ours("MILLRACE_REDIS_URL") and is_ours("AWS_SECRET_ACCESS_KEY") and is_ours("MILLRACE_SPOOL_DIR")
    assert not is_ours("MILLRACE_KEY_TEACHER") and not is_ours("JUDGE_API_KEY")


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_real_worker_does_not_have_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forks: bool) -> None:
    for name, value in {**OURS, **THEIRS}.items():
        monkeypatch.setenv(name, value)
    starter = WorkerStarter(forks=forks)
    secret = (tmp_path / "hunter2").open("w")
    os.set_inheritable(secret.fileno(), True)
    env = EnvSpec(name="r", id="spying-env", args_json=json.dumps({"into": str(tmp_path / "seen")}))
    worker = await WorkerProcess.spawn(env, starter, name="environ")
    try:
        loaded = await worker.loaded
        seen = json.loads((tmp_path / "seen").read_text())
        proc = Path(f"/proc/{worker.process.pid}")
        at_start = (proc / "environ").read_bytes().decode() + (proc / "cmdline").read_bytes().decode()
        private = worker.started.directory
        assert stat.S_IMODE(private.stat().st_mode) == 0o700 and seen["cwd"] == str(private)
    finally:
        await worker.close()
        await starter.close()
        secret.close()
    assert len(loaded.train) == 1, "it works without them"
    assert THEIRS.items() <= seen["environ"].items()
    assert not seen["environ"].keys() & OURS.keys()
    assert "hunter2" not in at_start + json.dumps(seen)
    # Standard files, one socket to talk, one for echoes, and what the listing itself opened.
    assert sum(link.startswith("socket:") for link in seen["files"].values()) == 2
    assert seen["umask"] == 0o077 and seen["core"] == [0, 0] and seen["session"] == worker.process.pid
    assert not private.exists()
