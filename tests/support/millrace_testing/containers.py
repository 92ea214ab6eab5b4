"""Real servers in containers for the tests of the compose suite, with images that it has built: nothing is pulled."""

import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Read when testcontainers is imported. Its reaper is an image that would have to be pulled, and is not needed: whoever
# starts a container here ends it, and run.sh what is left when it is interrupted.
os.environ |= {
    "TESTCONTAINERS_RYUK_DISABLED": "true",
    "TESTCONTAINERS_CONNECTION_MODE": "docker_host",
    "TC_HOST": "127.0.0.1",
}

from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient

from millrace.local.directory import free_port
from millrace_testing.deployment import until

REDIS, CEPH = "redis:7.2-bookworm", "millrace-test/ceph:latest"
LABEL = "millrace.test"
"""Of every container that is started here."""
START_S = 120.0


@contextmanager
def redis() -> Iterator[str]:
    """Run a Redis with the limits of the compose file and yield its URL."""
    command = ["redis-server", "--save", "", "--proto-max-bulk-len", "256mb", "--protected-mode", "no"]
    with _started(DockerContainer(REDIS).with_command(command), 6379) as port:
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def s3(directory: Path) -> Iterator[dict[str, str]]:
    """Run Ceph's gateway and yield the variables with which the storage conformance finds it."""
    key, secret = secrets.token_hex(10), secrets.token_hex(20)
    identity = {"name": "millrace", "credentials": [{"accessKey": key, "secretKey": secret}]}
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    data = DockerClient().client.volumes.create(labels={LABEL: "1"})
    container = DockerContainer(CEPH).with_volume_mapping(str(directory), "/run/millrace")
    try:
        with _started(container.with_volume_mapping(data.name, "/data", "rw"), 8333) as port:
            yield {
                "MILLRACE_TEST_S3_URL": f"s3://millrace-test?endpoint=http://127.0.0.1:{port}&region=us-east-1",
                "AWS_ACCESS_KEY_ID": key,
                "AWS_SECRET_ACCESS_KEY": secret,
            }
    finally:
        data.remove()


@contextmanager
def _started(container: DockerContainer, inner: int) -> Iterator[int]:
    """Run the container and yield its port on loopback."""
    DockerClient().client.images.get(container.image)  # raises: what is not here would be pulled
    port = free_port()
    container.with_kwargs(labels={LABEL: "1"})
    container.ports[f"{inner}/tcp"] = ("127.0.0.1", port)  # type: ignore[assignment]  # with_bind_ports binds all addresses

    def answers() -> bool:
        container.reload()
        assert container.status == "running", b"".join(container.get_logs())[-4000:].decode(errors="replace")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.settimeout(1)
                try:
                    return connection.recv(1) != b""  # the engine's proxy closes what nobody listens to
                except TimeoutError:
                    return True
        except OSError:
            return False

    with container:
        until(answers, what=f"{container.image} to answer", timeout_s=START_S)
        yield port
