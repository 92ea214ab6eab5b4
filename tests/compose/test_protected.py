"""The stack of docker-compose.tls.yml: mutual TLS and tokens on every server, and every secret from a file."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from millrace.local.directory import free_ports
from millrace_testing.deployment import CEPH, ROOT, Deployment, run, started

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

# Of every server: its answer to strangers without a token, without a certificate, without TLS. Run inside the stack.
ASK_ALL = """
import grpc, http.client, json, pathlib, ssl, sys, urllib.error, urllib.request
files = [pathlib.Path("/run/secrets", name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt")]
options = [("grpc.ssl_target_name_override", "millrace.internal")]
found = {}
methods, pages = json.loads(sys.argv[1])
for address, method in methods.items():
    for how, channel in {
        "no token": grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options),
        "no certificate": grpc.secure_channel(address, grpc.ssl_channel_credentials(files[0]), options),
        "plain text": grpc.insecure_channel(address),
    }.items():
        try:
            channel.unary_unary(method)(b"", timeout=20)
            found[f"{address} {how}"] = "answered"
        except grpc.RpcError as error:
            found[f"{address} {how}"] = error.code().name
def context(has_certificate):
    made = ssl.create_default_context(cadata=files[0].decode())
    made.check_hostname = False
    if has_certificate:
        made.load_cert_chain("/run/secrets/tls.crt", "/run/secrets/tls.key")
    return made
def ask(url, headers={}, has_certificate=True):
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, context=context(has_certificate), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return "refused"
workers = {"Authorization": "Bearer " + pathlib.Path("/run/secrets/workers.token").read_text().strip()}
for page in pages:
    found[f"{page} workers"] = ask("https://" + page, workers)
    found[f"{page} no token"] = ask("https://" + page)
    found[f"{page} no certificate"] = ask("https://" + page, workers, has_certificate=False)
    found[f"{page} plain text"] = ask("http://" + page, workers)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that docker/secrets.sh makes."""
    place = tmp_path_factory.mktemp("protected") / "secrets"
    run(["sh", "docker/secrets.sh", str(place)])
    return place


@pytest.fixture(scope="module")
def protected(images: None, secrets: Path) -> Iterator[Deployment]:
    """Yield the protected stack, up and healthy."""
    stack = Deployment(
        project="millraceprotected",
        port=free_ports(1)[0],
        files=("docker-compose.yml", "docker-compose.tls.yml", CEPH),
        variables={"MILLRACE_SECRETS": str(secrets), "S3_CONFIG": "/run/secrets/s3.json"},
    )
    with started(stack):
        yield stack


class Caller:
    """The client outside the containers, with or without what the stack demands."""

    def __init__(self, bin_: Path, stack: Deployment, secrets: Path) -> None:
        self._millrace, self._stack, self._secrets = str(bin_ / "millrace"), stack, secrets

    def attempt(
        self, *argv: str, ca: bool = True, certificate: bool = True, token: str = "client.token"
    ) -> tuple[int, str]:
        """Return exit code and output of `millrace run …`, called without what is False or empty."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        if certificate:
            env["MILLRACE_TLS_CERT"] = str(self._secrets / "client.crt")
            env["MILLRACE_TLS_KEY"] = str(self._secrets / "client.key")
        options = ["--server", f"localhost:{self._stack.port}"]
        options += ["--tls-ca", str(self._secrets / "ca.crt")] if ca else []
        options += ["--token-file", str(self._secrets / token)] if token else []
        done = subprocess.run(
            [self._millrace, "run", *argv, *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
        )
        return done.returncode, done.stdout + done.stderr


def test_with_everything_shown_it_trains_and_others_learn_nothing(
    protected: Deployment, secrets: Path, thin_client: Path, tmp_path: Path
) -> None:
    protected.compose("--profile", "cli", "run", "--rm", "-T", "example-model", timeout_s=600)
    caller = Caller(thin_client, protected, secrets)
    steps = ("--max-steps", "2", "--no-orchestrator.eval")
    submit = ("submit", "@", "examples/reverse_text/rl.toml", "--run.name", "guarded", *steps, "--follow", "--plain")
    code, output = caller.attempt(*submit, "--output-dir", str(tmp_path))
    assert code == 0, output[-3000:]
    code, output = caller.attempt("show", "guarded", "--format", "json")
    assert code == 0 and json.loads(output)["state"].endswith("SUCCEEDED"), output
    assert caller.attempt("audit", "guarded")[0] == 0
    assert "guarded" in protected.compose("run", "--rm", "-T", "--no-deps", "cli", "run", "list")

    (secrets / "foreign.token").write_text("mrt_" + "0" * 64)
    strangers = {
        "no token": (4, caller.attempt("list", token="")),
        "a foreign token": (4, caller.attempt("list", token="foreign.token")),
        "the workers' token": (4, caller.attempt("list", token="workers.token")),
        "no certificate": (5, caller.attempt("list", certificate=False)),
        "plain text": (5, caller.attempt("list", ca=False, certificate=False, token="")),
    }
    for who, (expected, (code, output)) in strangers.items():
        assert code == expected and "guarded" not in output, f"{who}: {output}"


def test_every_server_asks_for_a_certificate_and_a_token(protected: Deployment) -> None:
    worker = "/millrace.internal.v1.WorkerService/Register"
    methods = {
        "orchestrator:50051": "/millrace.v1.RunService/ListRuns",
        "env-server:50052": worker,
        "inference:50053": worker,
        "trainer:50054": worker,
    }
    metrics = [f"{service}:9090/metrics" for service in ("orchestrator", "env-server", "trainer")]
    pages = [*metrics, "inference:8000/metrics", "inference:8000/v1/models"]
    (orchestrator,) = protected.containers("orchestrator")
    found = json.loads(run(["docker", "exec", orchestrator, "python", "-c", ASK_ALL, json.dumps([methods, pages])]))
    called = {"no token": "UNAUTHENTICATED", "no certificate": "UNAVAILABLE", "plain text": "UNAVAILABLE"}
    read = {"no token": 401, "no certificate": "refused", "plain text": "refused"}
    opened = {page: found.pop(f"{page} workers") for page in pages}
    opened.pop("inference:8000/v1/models")  # it may have no model yet
    assert set(opened.values()) == {200}, opened
    assert found == {
        **{f"{address} {how}": code for address in methods for how, code in called.items()},
        **{f"{page} {how}": code for page in pages for how, code in read.items()},
    }
    (redis,) = protected.containers("redis")
    ping = ["redis-cli", "--tls", "--cacert", "/run/secrets/ca.crt", "ping"]
    assert "NOAUTH" in run(["docker", "exec", redis, *ping])


def test_a_redis_of_ones_own_in_a_variable_is_refused(protected: Deployment) -> None:
    own = {**protected.variables, "MILLRACE_REDIS_URL": "redis://:hunter22@cache:6379/0"}
    with pytest.raises(AssertionError, match="MILLRACE_REDIS_URL_FILE as well") as caught:
        dataclasses.replace(protected, variables=own).compose("run", "--rm", "-T", "--no-deps", "orchestrator")
    assert "hunter22" not in str(caught.value)


def test_no_secret_of_the_files_shows(protected: Deployment, secrets: Path) -> None:
    hidden = _secret_texts(secrets)
    assert len(hidden) == 7
    for container in protected.compose("ps", "--all", "--quiet").split():
        inspected = protected.inspect(container)
        seen = json.dumps(inspected) + run(["docker", "logs", container])
        if inspected["State"]["Running"]:
            seen += run(["docker", "top", container, "-o", "pid,args"])
        assert not [name for name, text in hidden.items() if text in seen], inspected["Name"]


def _secret_texts(secrets: Path) -> dict[str, str]:
    """Return every secret by where it is."""
    store: Sequence[str] = (secrets / "aws_credentials").read_text().split()
    keys = {name: (secrets / name).read_text().splitlines()[1] for name in ("tls.key", "client.key")}
    tokens = {name: (secrets / name).read_text().strip() for name in ("client.token", "workers.token")}
    password = (secrets / "redis.conf").read_text().split()[1]
    return {**keys, **tokens, "redis": password, "access key": store[3], "secret key": store[6]}
