"""An upgrade can be applied: what Kubernetes does not let change does not change, and runs live through it."""

import pytest

# Names of objects with state or clients. Changing one loses data or breaks an upgrade: that is a new major version.
SELECTOR = {"app.kubernetes.io/name": "millrace", "app.kubernetes.io/instance": "demo"}
STATEFUL = {"orchestrator", "env-server", "inference", "trainer", "redis", "object-store"}
_CHANGES = (
    "image.tag=9.9.9",
    "commonLabels.team=other",
    "logLevel=DEBUG",
    "envServer.replicas=7",
    "inference.replicas=7",
    "trainer.graceSeconds=900",
    "envServer.resources.requests.cpu=3",
)


def _immutable(rendered):
    found = {}
    for item in rendered.of_kind("StatefulSet"):
        spec = item["spec"]
        names = ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")
        found[item["metadata"]["name"]] = {name: spec.get(name) for name in names}
    return found


def test_selectors_are_these_for_ever(render):
    made = render("cpu")
    found = {item["metadata"]["name"]: item["spec"]["selector"] for item in made.of_kind("StatefulSet")}
    expected = {
        f"demo-millrace-{name}": {"matchLabels": {**SELECTOR, "app.kubernetes.io/component": name}} for name in STATEFUL
    }
    assert found == expected


@pytest.mark.parametrize("case", ["cpu", "external-stores"])
def test_nothing_immutable_depends_on_what_users_change(render, case):
    assert _immutable(render(case)) == _immutable(render(case, *_CHANGES))


def test_from_one_node_to_a_gang_and_back_the_leader_stays(render):
    before = _immutable(render("external-stores", "trainer.nodes=1"))["rl-trainer"]
    assert before == _immutable(render("external-stores"))["rl-trainer"]


def test_a_new_chart_alone_restarts_nothing(render):
    """Pod templates hold no version of the chart."""
    for pod in render("cpu").pods:
        if not pod.is_test:
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pod.labels)


def test_an_upgrade_goes_pod_by_pod(render):
    made = render("cpu")
    for name in ("env-server", "inference"):
        spec = made.one("StatefulSet", name)["spec"]
        assert spec["updateStrategy"] == {"type": "RollingUpdate"}
        assert spec["podManagementPolicy"] == "Parallel"
    assert made.one("StatefulSet", "inference")["spec"]["minReadySeconds"] > 0
    rollout = render("multi-node").of_kind("LeaderWorkerSet")[0]["spec"]["rolloutStrategy"]
    assert rollout["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_an_upgrade_leaves_replicas_to_the_autoscaler(render):
    made = render("multi-node")
    assert "replicas" not in made.one("StatefulSet", "env-server")["spec"]
    assert "replicas" not in made.of_kind("LeaderWorkerSet")[0]["spec"]
    for kind in ("ScaledObject", "HorizontalPodAutoscaler"):
        for item in made.of_kind(kind):
            target = item["spec"]["scaleTargetRef"]
            assert made.one(target["kind"], target["name"])["apiVersion"] == target["apiVersion"]


def test_spools_survive_scaling(render):
    spec = render("cpu").one("StatefulSet", "env-server")["spec"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenScaled": "Retain", "whenDeleted": "Retain"}


def test_images_are_pinned(rendered):
    for pod in rendered.pods:
        for container in pod.containers(init=True):
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            assert tag not in ("", "latest"), f"{pod.owner}: {container['image']}"
