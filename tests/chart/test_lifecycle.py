"""A real Helm installs, upgrades, rolls back and tests the chart, against a look-alike of the Kubernetes API.

See `look_alike.py` for how little that is of a cluster: objects are checked and stored, and nothing runs.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("kubernetes_validate")
from millrace_testing.look_alike import LookAlike

CHART = Path(__file__).parents[2] / "charts" / "millrace"
GENERATED = ("demo-millrace-redis", "demo-millrace-object-store", "demo-millrace-worker-token")


@dataclass
class Cluster:
    """Called with Helm's arguments; `api` has the objects."""

    helm: Callable[..., subprocess.CompletedProcess[str]]
    api: LookAlike

    def __call__(self, *words: str) -> str:
        result = self.helm(*words, "--namespace", "rl")
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


@pytest.fixture
def cluster(helm, tmp_path, monkeypatch):
    """Yield an empty one."""
    for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with LookAlike() as api:
        config = tmp_path / "kubeconfig"
        config.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "x", "cluster": {"server": api.url}}],
                    "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
                    "users": [{"name": "x", "user": {}}],
                    "current-context": "x",
                }
            )
        )
        monkeypatch.setenv("KUBECONFIG", str(config))

        yield Cluster(helm, api)


def test_install_upgrade_rollback_and_test(cluster):
    objects = cluster.api.objects
    cluster("install", "demo", str(CHART))
    secrets = {name: objects["Secret", name]["data"] for name in GENERATED}
    before = objects["StatefulSet", "demo-millrace-inference"]["spec"]["template"]

    cluster("upgrade", "demo", str(CHART), "--set", "image.tag=9.9.9,inference.replicas=3,envServer.workers=4")
    assert {name: objects["Secret", name]["data"] for name in GENERATED} == secrets, "passwords survive an upgrade"
    stateful = objects["StatefulSet", "demo-millrace-inference"]["spec"]
    assert stateful["replicas"] == 3
    assert stateful["template"]["spec"]["containers"][0]["image"].endswith(":9.9.9")

    cluster("rollback", "demo", "1")
    assert objects["StatefulSet", "demo-millrace-inference"]["spec"]["template"] == before
    assert {name: objects["Secret", name]["data"] for name in GENERATED} == secrets

    output = cluster("test", "demo")
    assert output.count("Phase:          Succeeded") == 2, output

    cluster("uninstall", "demo")
    assert {kind for kind, _ in objects} <= {"Pod"}, "only the pods of the test stay"
