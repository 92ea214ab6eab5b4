"""Pools of env-servers: each pod announces the very image that it runs, and nothing else finds or counts its pods."""

import pytest

from millrace.env_server.settings import EnvServerSettings

POOLS = {"browser": "registry.example.com/team/browser-env:1.2", "old": "team/old-env@sha256:" + "0123456789abcdef" * 4}


@pytest.fixture
def made(render):
    return render("pools")


def _container(made, name: str) -> dict:
    return made.one("StatefulSet", name)["spec"]["template"]["spec"]["containers"][0]


def _settings(container: dict) -> EnvServerSettings:
    environ = {item["name"]: item.get("value", "") for item in container["env"]}
    return EnvServerSettings.from_env(environ | {"MILLRACE_SPOOL_DIR": "/tmp/spool"})


@pytest.mark.parametrize("pool", POOLS)
def test_a_pod_announces_the_image_that_it_runs(made, pool):
    container = _container(made, f"env-pool-{pool}")
    assert container["image"] == _settings(container).image == POOLS[pool]
    assert _settings(_container(made, "millrace-env-server")).image == "", "the others play what names none"


def test_what_a_pool_does_not_say_is_as_for_the_others(made):
    browser, old = _container(made, "env-pool-browser"), _container(made, "env-pool-old")
    plain = _container(made, "millrace-env-server")
    assert old["resources"] == plain["resources"] != browser["resources"]
    assert (_settings(browser).num_workers, _settings(old).num_workers) == (2, 1)
    assert _settings(browser).max_processes == 1024 and _settings(browser).idle_s == _settings(old).idle_s == 60
    specs = {name: made.one("StatefulSet", name)["spec"] for name in ("env-pool-browser", "env-pool-old")}
    assert [spec["replicas"] for spec in specs.values()] == [2, 1], "pools do not scale by themselves"
    assert specs["env-pool-browser"]["template"]["spec"]["nodeSelector"] == {"pool": "browsers"}
    for spec in specs.values():
        assert "initContainers" not in spec["template"]["spec"], "what is installed elsewhere is not installed there"


def test_no_selector_finds_the_pods_of_another_set(made):
    sets = made.of_kind("StatefulSet")
    for item in sets:
        selector = item["spec"]["selector"]["matchLabels"].items()
        found = [
            each["metadata"]["name"]
            for each in sets
            if selector <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert found == [item["metadata"]["name"]]


def test_names_leave_room_for_what_kubernetes_appends(render):
    made = render(
        "",
        "fullnameOverride=" + "a" * 30,
        "envServer.pools[0].name=" + "b" * 12,
        "envServer.pools[0].image.repository=x",
        "envServer.pools[0].image.tag=v1",
    )
    [name] = [
        item["metadata"]["name"] for item in made.of_kind("StatefulSet") if "env-pool" in item["metadata"]["name"]
    ]
    assert len(name) + len("-0123456789") <= 63, "the revision is a label of each pod"


def test_certificates_and_metrics_reach_them(made):
    [certificate] = made.of_kind("Certificate")
    assert "*.demo-millrace-env-server-pool.rl.svc" in certificate["spec"]["dnsNames"]
    monitor = made.one("ServiceMonitor", "env-server-pool")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= made.one("Service", "env-server-pool-metrics")["metadata"]["labels"].items()


def test_interpreters_may_lie_where_the_values_say(made):
    for name in ("millrace-env-server", "env-pool-browser"):
        container = _container(made, name)
        assert _settings(container).pythons == ("/srv/venvs", "/opt/venvs")
        assert {"name": "venvs", "mountPath": "/srv/venvs", "readOnly": True} in container["volumeMounts"]


def test_without_pools_there_is_no_trace_of_them(render):
    made = render("cpu")
    names = {item["metadata"]["name"] for item in made.objects}
    assert not any("env-pool" in name or "env-server-pool" in name for name in names)
