"""`docker compose up` as a user has it: images, a run, kills, partitions, down and up again, no secrets anywhere."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.client import SyncClient
from millrace.errors import MillraceError
from millrace.v1 import run_pb2
from millrace_testing.deployment import OURS, Deployment, run, until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

RUN = ["rl", "@", "examples/reverse_text/rl.toml"]
FINISH_S = 1500.0
MILLRACE = Path(sys.executable).with_name("millrace")


class Submitted:
    """A run that the command line follows in a thread."""

    def __init__(self, stack: Deployment, name: str, *options: str) -> None:
        self.stack, self.name = stack, name
        self.output = ""
        self.error: BaseException | None = None
        self._argv = [*RUN, "--run.name", name, *options]
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self.output = self.stack.cli(*self._argv, timeout_s=FINISH_S)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            self.error = error

    def step(self) -> int:
        """Return steps done, as the API says; -1 before it knows the run."""
        try:
            return int(shown(self.stack, self.name).progress.step)
        except MillraceError:  # the run is not there yet, or the orchestrator is dead
            return -1

    def wait_step(self, step: int) -> None:
        """Returns when the run has done so many steps."""

        def is_there() -> bool:
            assert self.error is None, self.error
            return not self._thread.is_alive() or self.step() >= step

        until(is_there, what=f"step {step} of {self.name}", timeout_s=FINISH_S)

    def finish(self) -> str:
        """Return the run succeeded and its audit is clean; returns what the command line said."""
        self._thread.join(FINISH_S)
        assert not self._thread.is_alive(), f"{self.name} is not over after {FINISH_S:g} s"
        assert self.error is None, self.error
        assert "SUCCEEDED" in self.output, self.output[-2000:]
        outside(self.stack, "audit", self.name)
        return self.output


def outside(stack: Deployment, *argv: str) -> str:
    """`millrace run …` of this machine against the published port."""
    return run([str(MILLRACE), "run", *argv, "--server", f"127.0.0.1:{stack.port}"])


def shown(stack: Deployment, name: str) -> run_pb2.Run:
    """Return the run as the API tells it; asked without the command, whose start costs as much as a training step."""
    with SyncClient(f"127.0.0.1:{stack.port}") as client:
        return client.runs.get(f"runs/{name}")


def wait_success(stack: Deployment, name: str) -> None:
    """Returns when the run has succeeded; AssertionError as soon as it has not."""

    def has_succeeded() -> bool:
        run_now = shown(stack, name)
        assert run_now.state not in (run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_CANCELLED), run_now
        return run_now.state == run_pb2.RUN_STATE_SUCCEEDED

    until(has_succeeded, what=f"{name} to end", timeout_s=FINISH_S)


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.1f} s")


def test_each_image_holds_only_what_its_service_needs(deployment: Deployment) -> None:
    script = (
        "import importlib.util as u; print(*(m for m in ('torch', 'verifiers', 'vllm', 'pytest') if u.find_spec(m)))"
    )
    found = {
        name: run(["docker", "run", "--rm", "--entrypoint", "python", f"millrace-test/{name}", "-c", script]).split()
        for name in OURS
    }
    assert found == {"orchestrator": [], "env-server": ["verifiers"], "inference": ["torch"], "trainer": ["torch"]}
    for name in OURS:
        image = json.loads(run(["docker", "image", "inspect", f"millrace-test/{name}"]))[0]
        print(f"millrace-test/{name}: {image['Size'] / 1e6:.0f} MB")
        assert image["Config"]["User"] == "10001:10001"
        assert image["Config"]["Healthcheck"]["Test"][:3] == ["CMD", "python", "-m"]
        assert image["Config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_the_gpu_override_puts_vllm_and_the_trainer_on_gpus_and_changes_nothing_else(images: None) -> None:
    """Only as a file: no machine of the tests has a GPU. How the trainer starts its ranks: tests/contract."""
    both = ("docker-compose.yml", "docker-compose.gpu.yml")
    plain, gpu = (_config(Deployment(project="millracetest", port=1, files=files)) for files in (both[:1], both))
    changed = {name for name, service in gpu["services"].items() if service != plain["services"][name]}
    assert changed == {"inference", "trainer"}
    assert gpu["services"]["inference"]["environment"]["MILLRACE_ENGINE"] == "vllm"
    for name, place in (("inference", "0"), ("trainer", "1")):
        service = gpu["services"][name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
        assert service["environment"]["CUDA_VISIBLE_DEVICES"] == place
        assert service["build"]["args"]["ACCELERATOR"] == "cuda" and service["image"].endswith("-cuda")
        kept = {"restart", "read_only", "cap_drop", "security_opt", "healthcheck", "depends_on", "volumes", "tmpfs"}
        assert all(service.get(key) == plain["services"][name].get(key) for key in kept)


def test_variables_give_vllm_and_the_ranks_of_the_trainer_their_gpus(
    images: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = '{"tensor_parallel_size": 4}'
    monkeypatch.setenv("MILLRACE_INFERENCE_GPUS", "0,1,2,3")
    monkeypatch.setenv("MILLRACE_TRAINER_GPUS", "4,5,6,7")
    monkeypatch.setenv("MILLRACE_VLLM_FLAGS", flags)
    files = ("docker-compose.yml", "docker-compose.gpu.yml")
    services = _config(Deployment(project="millracetest", port=1, files=files))["services"]
    seen = {name: services[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in ("inference", "trainer")}
    assert seen == {"inference": "0,1,2,3", "trainer": "4,5,6,7"}
    assert services["inference"]["environment"]["MILLRACE_VLLM_FLAGS"] == flags


def test_the_image_override_adds_env_servers_that_announce_their_image(
    images: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only as a file: what an env-server does with the variable is tested as a process."""
    monkeypatch.setenv("MILLRACE_ENV_IMAGE", "registry.example.com/team/own-env:1.2")
    both = ("docker-compose.yml", "docker-compose.env-image.yml")
    plain, more = (_config(Deployment(project="millracetest", port=1, files=files)) for files in (both[:1], both))
    own = more["services"].pop("env-server-own")
    assert more["services"] == plain["services"]
    assert own["image"] == own["environment"].pop("MILLRACE_ENV_IMAGE") == "registry.example.com/team/own-env:1.2"
    other = plain["services"]["env-server"]
    assert "build" not in own and own["environment"] == other["environment"]
    kept = {"restart", "read_only", "cap_drop", "security_opt", "depends_on", "volumes", "tmpfs", "networks"}
    assert all(own.get(key) == other.get(key) for key in kept)


def _config(stack: Deployment) -> dict[str, Any]:
    try:
        return json.loads(stack.compose("config", "--format", "json"))
    finally:
        stack.forget()


def test_no_service_runs_as_root_or_may_become_it(deployment: Deployment) -> None:
    for service in (*OURS, "redis"):
        for container in deployment.containers(service):
            owners = [line.split()[1] for line in run(["docker", "top", container, "-o", "pid,uid"]).splitlines()[1:]]
            assert owners and "0" not in owners, f"{service} runs as {owners}"
            host = deployment.inspect(container)["HostConfig"]
            assert host["CapDrop"] == ["ALL"] and host["ReadonlyRootfs"] and not host["Privileged"]
            assert "no-new-privileges:true" in host["SecurityOpt"]
    ports = [
        binding["HostIp"]
        for service in (*OURS, "redis", "s3")
        for container in deployment.containers(service)
        for bindings in deployment.inspect(container)["NetworkSettings"]["Ports"].values()
        for binding in bindings or []
    ]
    assert ports == 2 * ["127.0.0.1"], "the API and the dashboard, on loopback, and nothing else"


def test_a_run_learns_although_everything_is_killed_once(deployment: Deployment) -> None:
    deployment.compose("--profile", "cli", "run", "--rm", "-T", "example-model", timeout_s=600)
    started = time.monotonic()
    killed = Submitted(deployment, "killed", "--max-steps", "40", "--orchestrator.eval.interval", "40")
    killed.wait_step(1)
    print(f"first step {time.monotonic() - started:.1f} s after its submission")
    for service in OURS:
        deployment.kill_main_process(service)
        at = killed.step()
        with timed(f"main process of {service} killed, until the next step"):
            killed.wait_step(at + 1)
    for service in (*OURS, "redis", "s3"):
        deployment.kill_container(service)
        at = killed.step()
        with timed(f"container of {service} killed, until the next step"):
            killed.wait_step(at + 1)
    output = killed.finish()
    match = re.search(r"held-out reward\s+([\d.]+) → ([\d.]+)", output)
    assert match and float(match[2]) > float(match[1]) + 0.03, output[-1500:]


def test_a_run_survives_partitions(deployment: Deployment) -> None:
    if subprocess.run(["nsenter", "--version"], capture_output=True).returncode or os.geteuid():
        pytest.skip("cutting a container's network needs nsenter and root")
    cut = Submitted(deployment, "cut-off", "--max-steps", "12", "--no-orchestrator.eval")
    for step, (service, other) in enumerate([("env-server", "inference"), ("trainer", "redis")], start=1):
        cut.wait_step(2 * step)
        heal = deployment.cut(service, other)
        time.sleep(20)  # longer than every connection's keep-alive
        heal()
        at = cut.step()
        with timed(f"network between {service} and {other} healed, until the next step"):
            cut.wait_step(at + 1)
    cut.finish()


def test_down_and_up_continues_the_run_with_more_replicas(deployment: Deployment) -> None:
    name = "continued"
    following = Submitted(deployment, name, "--max-steps", "16", "--no-orchestrator.eval")
    following.wait_step(2)
    deployment.compose("down", "--timeout", "45", timeout_s=200)
    deployment.up("--scale", "inference=2", "--scale", "env-server=2")

    assert [len(deployment.containers(service)) for service in ("inference", "env-server")] == [2, 2]
    wait_success(deployment, name)
    outside(deployment, "audit", name)


def test_a_client_outside_submits_to_localhost(deployment: Deployment, thin_client: Path, tmp_path: Path) -> None:
    millrace, server = str(thin_client / "millrace"), f"localhost:{deployment.port}"
    assert "continued" in run([millrace, "run", "list", "--server", server])
    name = "from-outside"
    options = ["--run.name", name, "--max-steps", "2", "--no-orchestrator.eval", "--follow", "--plain"]
    options += ["--output-dir", str(tmp_path)]
    run([millrace, "run", "submit", *RUN[1:], *options, "--server", server], timeout_s=FINISH_S)
    assert shown(deployment, name).state == run_pb2.RUN_STATE_SUCCEEDED


def test_no_secret_shows_in_inspect_or_logs(deployment: Deployment) -> None:
    (orchestrator,) = deployment.containers("orchestrator")
    text = run(["docker", "exec", orchestrator, "cat", "/run/millrace/aws_credentials"])
    secrets = re.findall(r"= ([0-9a-f]{20,})", text)
    assert len(secrets) == 2
    for container in deployment.compose("ps", "--all", "--quiet").split():
        seen = json.dumps(deployment.inspect(container)) + run(["docker", "logs", container])
        assert not [secret for secret in secrets if secret in seen], deployment.inspect(container)["Name"]
