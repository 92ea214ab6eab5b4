"""Every pod of every case: rights, probes, secrets, volumes, ends."""

import re

import pytest

# Pods that no Kubernetes probe looks at: the health of a gang is that of its leader.
_UNPROBED = {"trainer-worker", "inference-worker"}
_SECRET = re.compile(r"(PASSWORD|SECRET|_KEY(_ID)?$|(?<!TOKENIZERS)_TOKEN$|HF_TOKEN|REDIS_URL)")


def test_nothing_runs_as_root_or_can_become_it(rendered):
    for pod in rendered.pods:
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] == 10001, pod.owner
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any(pod.spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"))
        for container in pod.containers(init=True):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["privileged"] is False, pod.owner
            assert own["readOnlyRootFilesystem"] is True and own["runAsNonRoot"] is True, pod.owner
            assert own["capabilities"] == {"drop": ["ALL"]}, pod.owner


def test_no_pod_gets_a_token_of_the_api(rendered):
    for pod in rendered.pods:
        assert pod.spec["automountServiceAccountToken"] is False, pod.owner
        assert pod.spec["enableServiceLinks"] is False, pod.owner
    for account in rendered.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    assert not rendered.of_kind("Role") and not rendered.of_kind("ClusterRole")


def test_every_account_that_a_pod_names_exists(rendered):
    accounts = {item["metadata"]["name"] for item in rendered.of_kind("ServiceAccount")}
    used = {pod.spec["serviceAccountName"] for pod in rendered.pods if not pod.is_test}
    assert used == accounts


def test_every_server_has_three_probes(rendered):
    for pod in rendered.pods:
        for container in pod.containers():
            if pod.is_test or container["name"] in _UNPROBED or pod.component in _UNPROBED:
                continue
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert name in container, f"{pod.owner}: {name}"
            if pod.component not in ("redis", "object-store"):
                assert set(container["startupProbe"]) & {"grpc"}, f"{pod.owner}: Kubernetes' own gRPC probe"


def test_probes_ask_a_port_that_the_container_has(rendered):
    for pod in rendered.pods:
        for container in pod.containers():
            ports = {port["containerPort"] for port in container.get("ports", [])}
            names = {port["name"] for port in container.get("ports", [])}
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container.get(name, {})
                if "grpc" in probe:
                    assert probe["grpc"]["port"] in ports, pod.owner
                for kind in ("tcpSocket", "httpGet"):
                    if kind in probe:
                        assert probe[kind]["port"] in names, pod.owner


def test_no_volume_is_shared(rendered):
    claims = [claim for item in rendered.objects for claim in item.get("spec", {}).get("volumeClaimTemplates", [])]
    claims += rendered.of_kind("PersistentVolumeClaim")
    assert all(claim["spec"]["accessModes"] == ["ReadWriteOnce"] for claim in claims)
    for pod in rendered.pods:
        kinds = {kind for volume in pod.spec.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "secret", "configMap"}, f"{pod.owner}: {kinds}"


def test_mounts_have_volumes_and_writes_have_a_place(rendered):
    for item in rendered.objects:
        claims = {claim["metadata"]["name"] for claim in item.get("spec", {}).get("volumeClaimTemplates", [])}
        for pod in (pod for pod in rendered.pods if pod.owner == f"{item['kind']}/{item['metadata']['name']}"):
            volumes = [volume["name"] for volume in pod.spec.get("volumes", [])] + sorted(claims)
            assert len(volumes) == len(set(volumes)), pod.owner
            for container in pod.containers(init=True):
                mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
                assert set(mounts.values()) <= set(volumes), pod.owner
                if "python" in str(container.get("command")) or container in pod.containers():
                    assert "/tmp" in mounts, f"{pod.owner}/{container['name']}: the root file system is read-only"


def test_secrets_are_references(rendered):
    for pod in rendered.pods:
        for container in pod.containers(init=True):
            for variable in container.get("env", []):
                if _SECRET.search(variable["name"]) and not variable.get("value", "").startswith("/etc/millrace/"):
                    assert set(variable) == {"name", "valueFrom"}, f"{pod.owner}: {variable['name']} in plain"
    generated = {
        value for secret in rendered.of_kind("Secret") for value in secret.get("data", {}).values() if len(value) > 16
    }
    for item in rendered.objects:
        if item["kind"] != "Secret":
            assert not any(value in str(item) for value in generated), item["metadata"]["name"]


def test_what_is_given_is_not_made(render):
    """With secrets of one's own the chart makes none."""
    sets = ("redis.existingSecret=a", "objectStore.existingSecret=b", "auth.workers.existingSecret=c")
    assert not render("cpu", *sets).of_kind("Secret")
    assert len(render("cpu").of_kind("Secret")) == 3


def test_resources_are_asked_for(rendered):
    for pod in rendered.pods:
        for container in pod.containers(init=True):
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), f"{pod.owner}/{container['name']}"
            assert "memory" in resources["limits"], f"{pod.owner}/{container['name']}"
            extended = {name for name in resources["limits"] if "/" in name}
            for name in extended:
                assert resources["requests"][name] == resources["limits"][name], "Kubernetes wants both equal"


def test_gpus_go_where_they_are_asked_for(render):
    made = render("multi-node")
    for component in ("inference", "trainer"):
        container = made.pod(component).spec["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
    assert "nvidia.com/gpu" not in str(made.pod("orchestrator").spec)
    assert "nvidia.com/gpu" not in str(render("cpu").objects)


def test_a_pod_outlives_its_own_end(rendered):
    for pod in rendered.pods:
        environment = {item["name"]: item.get("value") for item in pod.spec["containers"][0].get("env", [])}
        if "MILLRACE_DRAIN_S" in environment:
            needed = float(environment["MILLRACE_DRAIN_S"] or 0) + float(environment["MILLRACE_GRACE_S"] or 0)
            assert pod.spec["terminationGracePeriodSeconds"] >= needed + 20, pod.owner


def test_torchrun_waits_as_long_as_the_pod_does(render):
    for case in ("multi-node", "external-stores", "single-gpu-node"):
        pod = render(case).pod("trainer")
        words = pod.spec["containers"][0]["args"]
        timeout = next(int(word.partition("=")[2]) for word in words if word.startswith("--shutdown-timeout="))
        assert 60 <= timeout < pod.spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("component", ["env-server", "inference"])
def test_a_drain_of_nodes_takes_one_at_a_time(render, component):
    budget = render("cpu").one("PodDisruptionBudget", component)["spec"]
    assert budget["maxUnavailable"] == 1 and budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    selected = budget["selector"]["matchLabels"]
    assert selected.items() <= render("cpu").pod(component).labels.items()


def test_single_pods_do_not_hold_up_a_drain(rendered):
    names = {item["metadata"]["name"].rpartition("-")[2] for item in rendered.of_kind("PodDisruptionBudget")}
    assert not names & {"orchestrator", "trainer", "redis", "store"}


def test_environments_never_get_the_hub_token_unless_asked(render):
    def names(case):
        return {item["name"] for item in render(case).pod("env-server").spec["containers"][0]["env"]}

    assert "HF_TOKEN" not in names("single-gpu-node")
    assert "HF_TOKEN" in names("external-stores")


def test_inference_gets_nothing_that_it_does_not_need(rendered):
    """It reads policies from the store and hears of them by gRPC: Redis is none of its business."""
    for container in rendered.pod("inference").containers():
        assert "MILLRACE_REDIS_URL" not in {item["name"] for item in container["env"]}
