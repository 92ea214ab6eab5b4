"""The variables that the chart sets are those that the services read, and have values that they take."""

import base64
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from millrace.env_server.settings import EnvServerSettings
from millrace.inference.settings import InferenceSettings
from millrace.readers.exports.of_run import traces_wanted
from millrace.rpc.access import ServerAccess
from millrace.rpc.tokens import new_token, token_line
from millrace.telemetry.settings import Settings, parse_address, variable_name

SERVICES = Path(__file__).parents[2] / "services" / "millrace"
ENTRIES = {
    "orchestrator": "orchestrator",
    "env-server": "env_server",
    "env-server-pool": "env_server",
    "inference": "inference",
    "trainer": "trainer",
    "trainer-worker": "trainer",
}
# Read by libraries below our code, by pip, or by the shell.
_OF_LIBRARIES = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "HF_TOKEN",
    "HOME",
    "OMP_NUM_THREADS",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "PIP_CONFIG_FILE",
    "PIP_DISABLE_PIP_VERSION_CHECK",
    "PIP_NO_CACHE_DIR",
    "PYTHONPATH",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "WANDB_API_KEY",
}
_USE = re.compile(r"\$\((\w+)\)")
_SHARED = {variable_name(part.name) for part in fields(Settings)}


def _own(component: str) -> set[str]:
    """Return the MILLRACE_ names in the code of a service beside those of Settings."""
    folder = SERVICES / ENTRIES[component]
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    return set(re.findall(r'"(MILLRACE_[A-Z0-9_]+)"', text))


def _environ(container: dict, *, name: str = "demo-0") -> dict[str, str]:
    """Return what the process would see; a secret is `redis://secret`."""
    environ = {item["name"]: item.get("value", "redis://secret:6379/0") for item in container["env"]}
    environ |= {
        "POD_NAME": name,
        "POD_INDEX": "0",
        "LWS_WORKER_INDEX": "0",
        "LWS_LEADER_ADDRESS": f"{name}.inference.rl",
    }
    return {key: _USE.sub(lambda use: environ[use[1]], value) for key, value in environ.items()}


def test_every_variable_is_read(rendered):
    for pod in rendered.pods:
        for container in pod.containers(init=True):
            variables = [item["name"] for item in container.get("env", [])]
            assert len(variables) == len(set(variables)), f"{pod.owner}: one is set twice"
            used = set(_USE.findall(json.dumps(container)))
            read = _SHARED | (_own(pod.component) if pod.component in ENTRIES else set())
            unread = set(variables) - read - used - _OF_LIBRARIES
            assert not unread, f"{pod.owner}/{container['name']}: nobody reads {sorted(unread)}"


def test_every_use_is_defined_before_it(rendered):
    for pod in rendered.pods:
        for container in pod.containers():
            # LeaderWorkerSet's webhook puts its variables in front of all others.
            seen = {"LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"} if pod.owner.startswith("LeaderWorkerSet/") else set()
            for item in container.get("env", []):
                assert set(_USE.findall(item.get("value", ""))) <= seen, f"{pod.owner}: {item['name']}"
                seen.add(item["name"])
            later = set(_USE.findall(json.dumps([container.get("command"), container.get("args")])))
            assert later <= seen, pod.owner


def test_the_settings_take_every_value(rendered):
    required = {
        "orchestrator": ["redis_url", "store_url", "listen"],
        "env-server": ["redis_url", "store_url", "orchestrator", "listen", "advertise"],
        "inference": ["listen", "http_listen", "store_url", "orchestrator", "advertise"],
        "trainer": ["redis_url", "store_url", "orchestrator"],
    }
    for component, names in required.items():
        container = rendered.pod(component).spec["containers"][0]
        settings = Settings.from_env(_environ(container), required=names)
        port = parse_address(settings.require("listen"))[1]
        assert port in {item["containerPort"] for item in container["ports"]}
        if settings.advertise:
            assert parse_address(settings.advertise)[1] == port
        assert settings.log_json


def test_the_services_own_settings_take_every_value(rendered):
    engine = InferenceSettings.from_env(_environ(rendered.pod("inference").spec["containers"][0]))
    assert engine.engine == ("vllm" if rendered.case in ("single-gpu-node", "multi-node") else "embedded")
    environ = _environ(rendered.pod("env-server").spec["containers"][0])
    environ["MILLRACE_SPOOL_DIR"] = "/tmp/spool"  # the real one is the pod's
    assert EnvServerSettings.from_env(environ).spool_bytes == 2 << 30


def test_every_server_may_start_as_it_is_set_up(rendered, tmp_path):
    """The rule of the code itself: no plain text and no open API beyond loopback, unless it is said."""
    token = new_token()
    if made := [item for item in rendered.of_kind("Secret") if item["metadata"]["name"].endswith("worker-token")]:
        token = base64.b64decode(made[0]["data"]["token"]).decode()
    files = {"worker-token/token": token, "tokens/tokens": token_line(new_token(), "alice")}
    files["metrics-token/token"] = new_token()
    for folder, text in files.items():
        path = tmp_path / folder
        path.parent.mkdir()
        path.write_text(text + "\n")
    kinds = {"orchestrator": ["public", "worker"], "env-server": ["worker"], "inference": ["worker"], "trainer": []}
    for component, wanted in kinds.items():
        container = rendered.pod(component).spec["containers"][0]
        environ = {key: value.replace("/etc/millrace", str(tmp_path)) for key, value in _environ(container).items()}
        access = ServerAccess.of(Settings.from_env(environ))
        access.require_safe("0.0.0.0:50051", wanted)
        assert access.is_insecure == (access.tls is None), "plain text is said, and only where it is"
        assert access.worker_tokens is not None


def test_files_that_variables_name_are_mounted(rendered):
    for pod in rendered.pods:
        for container in pod.containers():
            folders = {mount["mountPath"] for mount in container["volumeMounts"]}
            for item in container.get("env", []):
                value = item.get("value", "")
                if value.startswith("/etc/"):
                    assert value.rpartition("/")[0] in folders, f"{pod.owner}: {item['name']}={value}"


@pytest.mark.parametrize(
    ("case", "url"),
    [
        ("cpu", "s3://millrace?endpoint=http%3A%2F%2Fdemo-millrace-object-store.rl.svc%3A8333&region=us-east-1"),
        ("multi-node", "s3://rl-runs/team-a?region=eu-central-1"),
        ("external-stores", "s3://runs?endpoint=https%3A%2F%2Fs3.internal.example.com%3A9000&region=us-east-1"),
    ],
)
def test_the_store_is_the_one_that_the_code_opens(render, case, url):
    from millrace.storage import open_store

    environ = _environ(render(case).pod("trainer").spec["containers"][0])
    assert environ["MILLRACE_STORE_URL"] == url
    wanted = url.partition("?")[0].removeprefix("s3://")
    assert open_store(url).uri("x").endswith(f"{wanted}/x")


def test_flags_of_vllm(render):
    flags = json.loads(
        _environ(render("single-gpu-node").pod("inference").spec["containers"][0])["MILLRACE_VLLM_FLAGS"]
    )
    assert flags == {"gpu_memory_utilization": 0.9}
    environ = _environ(render("multi-node").pod("inference").spec["containers"][0], name="demo-millrace-inference-0")
    flags = json.loads(environ["MILLRACE_VLLM_FLAGS"])
    assert (flags["master_addr"], flags["node_rank"]) == ("demo-millrace-inference-0.inference.rl", "0")
    assert (flags["nnodes"], flags["tensor_parallel_size"]) == (2, 8)


def test_traces_are_sent_where_a_collector_is_named_and_nowhere_else(render):
    """By the orchestrator alone, and in the words that its exporter takes."""
    made = render("external-stores")
    for pod in made.pods:
        names = {item["name"] for item in pod.spec["containers"][0].get("env", []) if item["name"].startswith("OTEL_")}
        assert bool(names) == (pod.component == "orchestrator"), pod.owner
    variables = made.pod("orchestrator").spec["containers"][0]["env"]
    assert traces_wanted(_environ(made.pod("orchestrator").spec["containers"][0]))
    by_name = {item["name"]: item for item in variables}
    assert by_name["OTEL_TRACES_SAMPLER_ARG"]["value"] == "0.1"
    headers = by_name["OTEL_EXPORTER_OTLP_HEADERS"]["valueFrom"]["secretKeyRef"]
    assert headers == {"name": "collector", "key": "headers"}
    assert not traces_wanted(_environ(render("cpu").pod("orchestrator").spec["containers"][0]))
