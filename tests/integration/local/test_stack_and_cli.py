"""`millrace rl` and `millrace up` with a real Redis, real processes and gRPC; the services are small fakes."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from millrace_testing.local.stack_commands import finish, free_port, leftovers, run, start
from millrace_testing.polling import block_until

RL = """
max_steps = 3
seq_len = 64
[model]
name = "outputs/warm"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "reverse-text"
"""


@pytest.fixture
def project(tmp_path) -> Path:
    model = tmp_path / "outputs" / "warm"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "rl.toml").write_text(RL)
    return tmp_path


def test_a_run_from_command_to_summary_twice(project):
    for expected in ("demo", "other"):
        (project / "created").unlink(missing_ok=True)
        code, out, err = run(project, "rl", "@", "rl.toml", "--run.name", expected)
        assert code == 0, err
        path = project / out.splitlines()[-1]
        assert path == project / "outputs" / expected / "summary.json"
        data = json.loads(path.read_text())
        assert (data["reward_before"], data["reward_after"], data["steps"]) == (0.45, 0.75, 3)
        assert data["mismatch_kl"] == 2e-9 and data["trainer_wait_ratio"] == 0.5
        assert sorted(p.name for p in Path(data["policy_path"]).iterdir()) == ["config.json", "model.safetensors"]
        assert Path(data["checkpoint_path"]).is_dir() and Path(data["plot_path"]).stat().st_size > 5000
        assert {"stack_s", "start_s", "train_s", "finish_s", "stop_s"} <= data["phases"].keys()
        assert "step   3/3  reward 0.700" in err and "STOPPING -> SUCCEEDED" in err
        assert "held-out reward  0.450 → 0.750  (+0.300)" in out and "step   3/3" not in out
        logs = sorted(p.name for p in (path.parent / "logs").iterdir())
        services = ["env-server.log", "inference.log", "orchestrator.log", "redis.log", "stack.log", "trainer.log"]
        assert logs == sorted([*services, "fork-server.log"])
        assert len((path.parent / "metrics.jsonl").read_text().splitlines()) == 6
        assert leftovers(project) == []
    code, out, err = run(project, "rl", "@", "rl.toml", "--run.name", "demo")
    assert code == 2 and out == "" and "demo has the results of another run" in err, "never written over, nor a demo-2"
    names = project / "outputs" / "demo" / "store" / "millrace" / "names"
    names.mkdir(parents=True)
    (names / "demo").write_text("uid")
    code, out, err = run(project, "rl", "@", "rl.toml", "--run.name", "demo")
    assert code == 2 and "a run called 'demo' exists" in err and "--resume" in err and "--ckpt.resume_step K" in err


@pytest.mark.long
def test_a_failed_run_exits_1_with_the_reason(project):
    code, out, err = run(project, "rl", "@", "rl.toml", FAKE_FAIL="1")
    assert code == 1 and out == ""
    assert "failed: load_environment raised\n  at: env-server [ENV_LOAD_FAILED]" in err and "logs" in err
    assert leftovers(project) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_interrupt_while_running(project, number, code):
    process = start(project, "rl", "@", "rl.toml", "--run.name", "demo", FAKE_SLOW="1")
    block_until((project / "created").exists, what="the run")
    # The command, its reaper, the fork server, five processes, a worker.
    block_until(lambda: len(leftovers(project)) == 9, what="every process")
    began = time.monotonic()
    process.send_signal(number)
    got, out, err = finish(process, timeout=30)
    assert got == code and out == "" and "all processes are stopped" in err
    assert "; to go on, give the same command with --name demo --resume\n" in err
    assert time.monotonic() - began < 10
    assert leftovers(project) == []


@pytest.mark.long
@pytest.mark.parametrize("delay_s", [0.3, 1.0, 2.0])
def test_interrupt_at_any_time_of_the_start(project, delay_s):
    process = start(project, "rl", "@", "rl.toml", FAKE_DEAF="trainer")
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, timeout=30)
    # Python itself ends with the signal when that comes during the very first imports; a shell shows 130 for both. On a
    # busy machine the signal may even come before Python has set itself up, which is none of our doing.
    is_set_up = "Failed to import the site module" not in err
    assert (code in (130, -signal.SIGINT) or not is_set_up) and out == ""
    assert leftovers(project) == []


@pytest.mark.long
def test_sigkill_leaves_nothing_behind(project):
    process = start(project, "rl", "@", "rl.toml", FAKE_SLOW="1")
    block_until((project / "created").exists, what="the run")
    process.kill()
    process.communicate(timeout=10)
    block_until(lambda: not leftovers(project), what="all processes to end", timeout_s=15)


@pytest.mark.long
def test_a_process_that_dies_at_the_start_is_named_with_its_last_lines(project):
    code, _, err = run(project, "rl", "@", "rl.toml", FAKE_DIE="inference")
    assert code == 1
    assert "Error: inference died: exit code 1" in err and "  | inference cannot start: no such model" in err
    assert "inference.log" in err
    assert leftovers(project) == []


@pytest.mark.long
def test_a_process_that_dies_later_is_started_again_until_that_is_hopeless(project):
    code, _, err = run(project, "rl", "@", "rl.toml", FAKE_DIE_LATER="trainer", FAKE_SLOW="1")
    assert code == 1
    assert [f"started again (restart {n})" in err for n in range(1, 6)] == [True] * 4 + [False], err[-4000:]
    assert "Error: trainer died: exit code 7" in err and "  | out of memory" in err
    assert "for the 5th time in a row, so it is not started again" in err
    assert leftovers(project) == []


@pytest.mark.long
def test_a_death_stops_a_stack_that_does_not_restart(project):
    options = ["up", "--no-restart", "--listen", f"127.0.0.1:{free_port()}", "--http-port", str(free_port())]
    process = start(project, *options)
    assert process.stdout is not None and "ready" in process.stdout.readline()
    pids = json.loads((project / "outputs" / "local" / "stack.json").read_text())["pids"]
    os.kill(pids["trainer"], signal.SIGKILL)
    code, _, err = finish(process, timeout=30)
    assert code == 1 and "Error: trainer died: signal SIGKILL" in err and "(restart" not in err
    assert leftovers(project) == []


def test_port_in_use_names_port_purpose_and_remedy(project):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(project, "rl", "@", "rl.toml", "--inference.server.port", str(port))
        assert code == 5
        assert f"port {port} on 127.0.0.1 is in use; it is needed for the inference engine's HTTP API" in err
        assert "--inference.server.port" in err
        code, _, err = run(project, "up", "--listen", f"127.0.0.1:{port}")
        assert code == 5 and f"port {port}" in err and "orchestrator" in err and "--listen" in err
    assert leftovers(project) == []


@pytest.mark.long
def test_unreachable_redis_and_store_exit_5(project):
    code, _, err = run(project, "rl", "@", "rl.toml", MILLRACE_REDIS_URL="redis://user:hunter22@127.0.0.1:1/0")
    assert code == 5
    assert "127.0.0.1:1/0 (MILLRACE_REDIS_URL) does not answer" in err and "unset it" in err and "hunter22" not in err
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    url = "s3://bucket?endpoint=http://127.0.0.1:1"
    code, _, err = run(project, "rl", "@", "rl.toml", MILLRACE_STORE_URL=url, **keys)
    assert code == 5
    assert "127.0.0.1:1" in err and "MILLRACE_STORE_URL" in err and "unset it" in err
    assert leftovers(project) == []


def test_up_serves_runs_and_its_directory_is_locked(project):
    address = f"127.0.0.1:{free_port()}"
    process = start(project, "up", "--listen", address, "--http-port", str(free_port()))
    try:
        assert process.stdout is not None
        assert f"listens on {address}" in process.stdout.readline()
        assert process.stdout.readline().strip() == f"export MILLRACE_SERVER={address}"
        code, out, err = run(project, "rl", "@", "rl.toml", "--name", "remote", "--server", address)
        assert code == 0, err
        data = json.loads((project / out.splitlines()[-1]).read_text())
        assert data["name"] == "runs/remote" and Path(data["policy_path"]).is_dir()
        code, out, err = run(project, "run", "list", MILLRACE_SERVER=address)
        assert code == 0 and "remote  QUEUED" in out
        code, out, err = run(project, "run", "logs", "rem", "--component", "trainer", MILLRACE_SERVER=address)
        assert (code, out) == (0, "") and "only lines of remote" in err  # the are-in says nothing of a run
        code, out, _ = run(project, "run", "logs", "rem", "--component", "redis", "--all", MILLRACE_SERVER=address)
        assert code == 0 and "Ready to accept connections" in out
        code, _, err = run(project, "up", "--listen", f"127.0.0.1:{free_port()}", "--http-port", str(free_port()))
        assert code == 2 and f"another stack (pid {process.pid}) runs in" in err
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process, timeout=30)
    assert code == 130
    assert err.splitlines()[-1].startswith(
        "stopped. Its runs are in outputs/local and go on with the next `millrace up"
    )
    assert leftovers(project) == []


@pytest.mark.long
def test_detaching_from_a_server_leaves_the_run(project):
    address = f"127.0.0.1:{free_port()}"
    up = start(project, "up", "--listen", address, "--http-port", str(free_port()), FAKE_SLOW="1")
    try:
        assert up.stdout is not None and "ready" in up.stdout.readline()
        follower = start(project, "rl", "@", "rl.toml", "--server", address)
        block_until((project / "created").exists, what="the run")
        time.sleep(0.5)
        follower.send_signal(signal.SIGINT)
        code, _, err = finish(follower, timeout=30)
        assert code == 130
        assert "detached; the run continues.   reattach: millrace run watch made-up    stop: millrace run cancel" in err
        assert up.poll() is None
    finally:
        up.send_signal(signal.SIGTERM)
        code, _, _ = finish(up, timeout=30)
    assert code == 143
    assert leftovers(project) == []
