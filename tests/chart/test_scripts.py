"""The small programs inside the templates, run: installing environments, the Redis configuration, `helm test`."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

CHART = Path(__file__).parents[2] / "charts" / "millrace"


def _wheel(folder: Path) -> Path:
    """Return the smallest wheel there is: one module."""
    path = folder / "tiny_env-1.0-py3-none-any.whl"
    info = "tiny_env-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_env.py", "ANSWER = 42\n")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-env\nVersion: 1.0\nRequires-Dist: click\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.parametrize(
    "after_an_image",
    [pytest.param(False, id="alone", marks=pytest.mark.slow), pytest.param(True, id="after an environment image")],
)
def test_packages_are_installed_beside_those_of_the_image(render, tmp_path, after_an_image):
    init = render("external-stores").pod("env-server").spec["initContainers"]
    container = next(item for item in init if item["name"] == "environments-pip")
    code, folder, *requirements = container["args"]
    assert (folder, requirements) == ("/opt/environments", ["my-env==1.2.0"])
    target = tmp_path / "environments"
    if after_an_image:
        (target / "python" / "other_env").mkdir(parents=True)
    else:
        target.mkdir()
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-c", code, str(target), str(_wheel(tmp_path))]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert not list((target / "python").glob("click*")), "the image has it already"
    (mount,) = [item for item in container["volumeMounts"] if item["name"] == "environments"]
    server = render("external-stores").pod("env-server").spec["containers"][0]
    path = next(item["value"] for item in server["env"] if item["name"] == "PYTHONPATH")
    environ["PYTHONPATH"] = path.replace(mount["mountPath"], str(target))
    show = [sys.executable, "-c", "import tiny_env; print(tiny_env.ANSWER)"]
    assert subprocess.run(show, env=environ, capture_output=True, text=True, timeout=30, check=True).stdout == "42\n"
    assert not after_an_image or (target / "python" / "other_env").is_dir()


def test_environment_images_are_copied_by_path_and_never_as_code(render):
    init = render("single-gpu-node").pod("env-server").spec["initContainers"]
    (copy,) = [item for item in init if item["name"] == "environments-0"]
    assert copy["image"] == "registry.example.com/team/envs:3"
    assert copy["args"][-1] == "/site-packages" and "/site-packages" not in copy["args"][0]


def test_the_bundled_redis_starts_with_its_configuration(render, tmp_path):
    """Under a real server (Valkey); the password is asked for and is in no argument."""
    from millrace.local.redis import find_server, free_port

    binary = find_server()
    (bin_folder := tmp_path / "bin").mkdir()
    (bin_folder / "redis-server").symlink_to(binary)
    port = free_port()
    made = render("cpu")
    config = made.one("ConfigMap", "redis")["data"]["redis.conf"]
    (tmp_path / "redis.conf").write_text(
        config.replace("dir /data", f"dir {tmp_path}")
        .replace("port 6379", f"port {port}")
        .replace("* -::*", "127.0.0.1")
    )
    (tmp_path / "password").write_text("s3cret-of-the-test")
    script = made.pod("redis").spec["containers"][0]["args"][0]
    for inside, here in (
        ("/etc/redis-auth/password", tmp_path / "password"),
        ("/etc/redis/redis.conf", tmp_path / "redis.conf"),
        ("/tmp/auth.conf", tmp_path / "auth.conf"),
    ):
        script = script.replace(inside, str(here))
    environ = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    server = subprocess.Popen(["sh", "-c", script], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        assert server.stdout is not None
        for line in server.stdout:
            if "Ready to accept connections" in line:
                break
        client = redis.Redis(port=port, password="s3cret-of-the-test")
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("proto-max-bulk-len") == {"proto-max-bulk-len": str(256 << 20)}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, retry=Retry(NoBackoff(), 0)).ping()
        arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes() + Path(f"/proc/{server.pid}/environ").read_bytes()
        assert b"s3cret" not in arguments
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def test_the_store_is_prepared_by_a_command_that_exists(render, tmp_path):
    """The rendered command, against a directory in place of the bucket."""
    (container,) = render("cpu").pod("orchestrator").spec["initContainers"]
    assert container["args"] == ["--create-bucket"]
    assert "args" not in render("multi-node").pod("orchestrator").spec["initContainers"][0]
    command = [sys.executable, *container["command"][1:], *container["args"]]
    environ = {**os.environ, "MILLRACE_STORE_URL": f"file://{tmp_path}/store", "MILLRACE_PREFIX": "millrace"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_the_run_of_helm_test_is_a_valid_run(render, tmp_path):
    """Its command line, as a dry run; the example model is where the trainer makes it."""
    made = render("cpu")
    (pod,) = [pod for pod in made.pods if pod.owner.endswith("test-run")]
    script = pod.spec["containers"][0]["args"][0]
    first, second = textwrap.dedent(script).replace("\\\n", " ").strip().splitlines()
    words = shlex.split(first.replace("/workspace/examples", str(CHART.parents[1] / "examples")))
    assert words[:2] == ["millrace", "rl"]
    command = [sys.executable, "-m", "millrace.cli", *words[1:], "--dry-run"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert re.search(r"max_steps\D+2\b", result.stdout)
    assert shlex.split(second)[:3] == ["millrace", "run", "audit"]
    init = made.pod("trainer").spec["initContainers"][0]
    assert words[words.index("--model.name") + 1] == f"{init['args'][-1]}/base"
    assert Path(str(CHART.parents[1]) + init["command"][1].removeprefix("/workspace")).is_file()


def test_helm_test_asks_the_service_that_is_there(render):
    (pod,) = [pod for pod in render("cpu").pods if pod.owner.endswith("test-connection")]
    script = pod.spec["containers"][0]["args"][0]
    assert "millrace.rpc.probe" in script and "millrace.v1.RunService" in script
