"""Services lead to ports that exist, and the policies let through what the services say to each other, and no more."""

import itertools

import pytest

# Who calls whom, at which port of the callee.
CALLS = {
    ("env-server", "orchestrator", 50051),
    ("inference", "orchestrator", 50051),
    ("trainer", "orchestrator", 50051),
    ("helm-test", "orchestrator", 50051),
    ("orchestrator", "env-server", 50052),
    ("orchestrator", "inference", 50053),
    ("orchestrator", "inference", 8000),
    ("env-server", "inference", 8000),
    ("orchestrator", "redis", 6379),
    ("env-server", "redis", 6379),
    ("trainer", "redis", 6379),
    ("orchestrator", "object-store", 8333),
    ("env-server", "object-store", 8333),
    ("inference", "object-store", 8333),
    ("trainer", "object-store", 8333),
}
PORTS = {"orchestrator": [50051, 8080, 9090], "env-server": [50052, 9090], "inference": [50053, 8000]}
PORTS["env-server-pool"] = PORTS["env-server"]
PORTS |= {"trainer": [50054, 9090], "redis": [6379], "object-store": [8333]}


POOL = ("envServer.pools[0].name=own", "envServer.pools[0].image.repository=own", "envServer.pools[0].image.tag=v1")


def _matches(selector: dict, labels: dict[str, str]) -> bool:
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    return all(labels.get(item["key"]) in item["values"] for item in selector.get("matchExpressions", []))


def _allows(rules: list[dict], side: str, labels: dict[str, str], port: int) -> bool:
    for rule in rules:
        peers, ports = rule.get(side), rule.get("ports")
        if ports is not None and port not in {item["port"] for item in ports}:
            continue
        if peers is None or any("podSelector" in peer and _matches(peer["podSelector"], labels) for peer in peers):
            return True
    return False


def _may_call(rendered, caller: str, callee: str, port: int) -> bool:
    """As a network plugin decides: every policy that selects a pod is a list of what is allowed."""
    source, target = _labels(rendered, caller), _labels(rendered, callee)
    policies = [item["spec"] for item in rendered.of_kind("NetworkPolicy")]
    into = [item for item in policies if _matches(item["podSelector"], target) and "Ingress" in item["policyTypes"]]
    out = [item for item in policies if _matches(item["podSelector"], source) and "Egress" in item["policyTypes"]]
    allowed_in = not into or any(_allows(item.get("ingress", []), "from", source, port) for item in into)
    return allowed_in and (not out or any(_allows(item.get("egress", []), "to", target, port) for item in out))


def _labels(rendered, component: str) -> dict[str, str]:
    return next(pod.labels for pod in rendered.pods if pod.component == component)


def test_services_lead_to_ports_that_exist(rendered):
    for service in rendered.of_kind("Service"):
        selector = service["spec"]["selector"]
        pods = [pod for pod in rendered.pods if selector.items() <= pod.labels.items()]
        assert pods, service["metadata"]["name"]
        for pod, port in itertools.product(pods, service["spec"]["ports"]):
            ports = {item["name"]: item["containerPort"] for item in pod.spec["containers"][0]["ports"]}
            assert ports[port["targetPort"]] == port["port"], f"{service['metadata']['name']} {port}"


def test_every_statefulset_has_its_service(rendered):
    services = {item["metadata"]["name"] for item in rendered.of_kind("Service")}
    for item in rendered.of_kind("StatefulSet"):
        assert item["spec"]["serviceName"] in services


def test_the_addresses_that_pods_tell_are_names_of_a_headless_service(render):
    made = render("cpu")
    for component in ("env-server", "inference"):
        service = made.one("Service", component)
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
        environment = {item["name"]: item.get("value") for item in made.pod(component).spec["containers"][0]["env"]}
        assert environment["MILLRACE_ADVERTISE"].startswith(f"$(POD_NAME).{service['metadata']['name']}.rl.svc:")


def _as_env_server(component: str) -> str:
    """Return pools call, and are called, as the other env-servers are."""
    return component.removesuffix("-pool")


@pytest.mark.parametrize(
    "caller", ["orchestrator", "env-server", "env-server-pool", "inference", "trainer", "helm-test"]
)
def test_policies_allow_what_is_needed_and_nothing_else(render, caller):
    made = render("cpu", *POOL)
    for callee, ports in PORTS.items():
        for port in ports:
            expected = (_as_env_server(caller), _as_env_server(callee), port) in CALLS
            assert _may_call(made, caller, callee, port) == expected, f"{caller} -> {callee}:{port}"


def test_a_stranger_reaches_nothing(render):
    made = render("cpu")
    policies = made.of_kind("NetworkPolicy")
    for pod in made.pods:
        if pod.is_test:
            continue
        chosen = [item["spec"] for item in policies if _matches(item["spec"]["podSelector"], pod.labels)]
        assert chosen, f"{pod.owner} has no policy"
        for port in PORTS[pod.component]:
            assert not any(_allows(item.get("ingress", []), "from", {"app": "stranger"}, port) for item in chosen)


def test_nodes_of_a_gang_reach_each_other(render):
    for case in ("multi-node", "external-stores"):
        assert _may_call(render(case), "trainer-worker", "trainer", 29400)
        assert _may_call(render(case), "trainer", "trainer-worker", 41234)  # NCCL takes any port
    assert not _may_call(render("cpu"), "trainer", "trainer", 29400)


def test_environments_reach_the_internet_only_where_it_is_allowed(render):
    def blocks(case):
        rules = render(case).one("NetworkPolicy", "env-server")["spec"]["egress"]
        return [peer["ipBlock"] for rule in rules for peer in rule.get("to", []) if "ipBlock" in peer]

    assert not blocks("cpu")
    internet, by_ipv6 = blocks("single-gpu-node")
    assert by_ipv6["cidr"] == "::/0" and "fc00::/7" in by_ipv6["except"]
    assert "169.254.0.0/16" in internet["except"] and "10.0.0.0/8" in internet["except"]
    assert blocks("external-stores") == [{"cidr": "10.1.0.0/16"}]


def test_only_the_public_api_is_published(render):
    (rule,) = render("external-stores").one("Ingress", "orchestrator")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["path"] == "/millrace.v1.RunService"
    (rule,) = render("multi-node").one("GRPCRoute", "orchestrator")["spec"]["rules"]
    assert rule["matches"] == [{"method": {"service": "millrace.v1.RunService"}}]


def test_the_dashboard_has_a_service_and_nobody_else_is_published_with_it(render):
    made = render("cpu")
    (port,) = made.one("Service", "orchestrator-dashboard")["spec"]["ports"]
    assert (port["port"], port["targetPort"], port["appProtocol"]) == (8080, "dashboard", "http")
    (api,) = made.one("Service", "-orchestrator")["spec"]["ports"]
    assert api["port"] == 50051
    assert not made.of_kind("Ingress")


def test_the_ingress_of_the_dashboard_reaches_it(render):
    made = render("external-stores")
    ingress = made.one("Ingress", "orchestrator-dashboard")
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = made.one("Service", "orchestrator-dashboard")
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "dashboard"}}
    assert ingress["spec"]["tls"] == [{"hosts": [rule["host"]], "secretName": "dashboard-example-com"}]
    rules = made.one("NetworkPolicy", "orchestrator")["spec"]["ingress"]
    (peers,) = [item["from"] for item in rules if [port["port"] for port in item["ports"]] == [8080]]
    assert peers == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}]


def test_without_the_dashboard_nothing_of_it_is_left(render):
    made = render("cpu", "orchestrator.dashboard.enabled=false")
    assert not [item for item in made.of_kind("Service") if item["metadata"]["name"].endswith("dashboard")]
    (container,) = made.pod("orchestrator").spec["containers"]
    assert "dashboard" not in {port["name"] for port in container["ports"]}
    assert "MILLRACE_DASHBOARD_LISTEN" not in {item["name"] for item in container["env"]}


def test_certificates_have_the_names_that_callers_use(render):
    made = render("multi-node")
    names = made.of_kind("Certificate")[0]["spec"]["dnsNames"]
    environment = {item["name"]: item.get("value") for item in made.pod("inference").spec["containers"][0]["env"]}
    dashboard = made.one("Service", "orchestrator-dashboard")["metadata"]["name"] + ".rl.svc:8080"
    for address in (environment["MILLRACE_ORCHESTRATOR"], environment["MILLRACE_ADVERTISE"], dashboard):
        host = address.rpartition(":")[0]
        assert host in names or f"*.{host.partition('.')[2]}" in names, host
