"""Alerts and scalers look at metrics that the code exports; Prometheus gets in with a token and nobody else does."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from millrace.env_server import run as env_server
from millrace.inference import updater as inference
from millrace.inference.engine import EngineState, EngineStatus
from millrace.orchestrator import meters as orchestrator
from millrace.orchestrator.tenants import UsageReader
from millrace.orchestrator.workers import WorkerRegistry
from millrace.telemetry.metrics import make_registry
from millrace.trainer import meters as trainer

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
# vLLM's own names (vllm/v1/metrics/loggers.py of 0.32).
VLLM = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:generation_tokens_total"}
PROCESS = {"process_start_time_seconds"}
WITH_RULES = ("multi-node", "external-stores")
SCRAPED = {"orchestrator": "metrics", "env-server": "metrics", "trainer": "metrics", "inference": "http"}


def _engine_status() -> EngineStatus:
    return EngineStatus(
        state=EngineState.EMPTY,
        identity=None,
        is_paused=False,
        num_running=0,
        num_waiting=0,
        max_num_seqs=1,
        max_model_len=1,
        progress_age_s=0.0,
        num_generated_tokens=0,
        num_finished=0,
    )


def _registries() -> dict[str, CollectorRegistry]:
    """Return what each service's own code makes, over parts that hold nothing."""
    spool = SimpleNamespace(num_rollouts=0, num_bytes=0, limit_bytes=1)
    service = SimpleNamespace(pools=[], num_rollouts=0, capacity=1)
    catalog, manager = SimpleNamespace(views=[]), SimpleNamespace(driven=list)
    usage = UsageReader(SimpleNamespace(), "millrace")  # type: ignore[arg-type]
    return {
        "orchestrator": orchestrator.registry_of(manager, catalog, WorkerRegistry(), usage),  # type: ignore[arg-type]
        "env-server": env_server.registry_of(service, SimpleNamespace(num_pending=0, spool=spool)),  # type: ignore[arg-type]
        "trainer": trainer.registry_of(lambda: False),
        "inference": make_registry("inference", inference.collectors(_engine_status)),
    }


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, set[str]]]:
    """By service: its metrics of ours and the labels of each, as Prometheus would store them."""
    found: dict[str, dict[str, set[str]]] = {}
    for service, registry in _registries().items():
        assert generate_latest(registry)
        found[service] = {}
        for collector in list(registry._collector_to_names):
            own = getattr(collector, "_labelnames", None)
            for metric in collector.describe() if hasattr(collector, "describe") else []:
                labels = set(own if own is not None else getattr(metric, "_labelnames", ()))
                endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
                found[service] |= {f"{metric.name}{ending}": labels for ending in endings}
    return found


def _metrics(expression: str) -> set[str]:
    return set(re.findall(r"(?:millrace_|vllm:|process_)\w+", re.sub(r'"[^"]*"', '""', expression)))


def _matchers(expression: str) -> list[tuple[str, set[str]]]:
    """Return each of our metrics with the labels that it is selected by, those of the target left out."""
    found = re.findall(r"(millrace_\w+)\{([^}]*)\}", expression)
    of_target = {"namespace", "service", "pod"}
    return [
        (name, set(re.findall(r"(\w+)(?:=|!)", re.sub(r'"[^"]*"', "", inner))) - of_target) for name, inner in found
    ]


def _rules(made) -> list[dict]:
    (item,) = made.of_kind("PrometheusRule")
    return [rule for group in item["spec"]["groups"] for rule in group["rules"]]


def _dashboard(made) -> dict:
    (item,) = (each for each in made.of_kind("ConfigMap") if each["metadata"]["name"].endswith("-grafana"))
    return json.loads(item["data"]["millrace.json"])


def _panels(render) -> list[tuple[str, str]]:
    """Return title and query of everything that the dashboard draws."""
    panels = _dashboard(render("multi-node"))["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def _expressions(render) -> list[str]:
    found = [rule["expr"] for case in WITH_RULES for rule in _rules(render(case))]
    for item in render("multi-node").of_kind("ScaledObject"):
        found += [trigger["metadata"]["query"] for trigger in item["spec"]["triggers"]]
    return found


def test_rules_and_queries_use_metrics_that_exist(render, exported):
    ours = {name: labels for service in exported.values() for name, labels in service.items()}
    assert len(ours) > 40
    for expression in _expressions(render):
        assert _metrics(expression) <= ours.keys() | VLLM | PROCESS, expression
        for name, labels in _matchers(expression):
            assert labels <= ours[name], f"{name} has no such label: {expression}"


def test_the_dashboard_draws_metrics_that_exist(render, exported):
    ours = {name: labels for service in exported.values() for name, labels in service.items()}
    panels = _panels(render)
    assert len(panels) > 15 and len({panel["id"] for panel in _dashboard(render("multi-node"))["panels"]}) > 12
    for title, query in panels:
        assert _metrics(query) and _metrics(query) <= ours.keys() | VLLM, title
        for name, labels in _matchers(query):
            assert labels <= ours[name], f"{title}: {name} has no such label"
        for by in re.findall(r"by \(([^)]*)\)", query):
            known = set().union(*(ours.get(name, set()) for name in _metrics(query))) | {"le"}
            assert {label.strip() for label in by.split(",")} <= known, title


def test_every_service_says_when_it_started():
    for service, registry in _registries().items():
        assert all(registry.get_sample_value(name) for name in PROCESS), service


def test_a_misspelt_name_would_be_found(exported):
    ours = {name for service in exported.values() for name in service}
    assert not _metrics('rate(millrace_runz{state="running"}[5m]) > 0') <= ours
    assert _matchers('millrace_runs{stat="x",namespace="y"}') == [("millrace_runs", {"stat"})]


def test_alerts_look_where_the_metric_is(render, exported):
    """A rule that selects another component's pods would never fire."""
    engines = {name for name in exported["inference"] if name.startswith("millrace_inference")}
    for expression in _expressions(render):
        for name in _metrics(expression) & engines:
            for inner in re.findall(rf"{name}\{{([^}}]*)\}}", expression):
                assert "inference-http" in inner, expression


def test_every_alert_says_what_to_do(render):
    for case in WITH_RULES:
        rules = _rules(render(case))
        assert len({rule["alert"] for rule in rules}) == len(rules) >= 15
        for rule in rules:
            assert len(rule["annotations"]["description"]) > 40 and rule["annotations"]["summary"].endswith("."), rule
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["for"]


@pytest.mark.parametrize("case", WITH_RULES)
def test_prometheus_takes_the_rules(render, case, tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    (item,) = render(case).of_kind("PrometheusRule")
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(item["spec"]))
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Series of a bad hour at the multi-node release's services, and the alert that each must raise. Counters begin where
# the code lets them begin, and then rise once, by a burst. Each text is one more pod.
_BAD = {
    "MillraceRunStalled": ("orchestrator", "millrace_orchestrator_seconds_since_batch", "run='r'", ["0+60x120"]),
    "MillraceLeaseFlaps": (
        "orchestrator",
        "millrace_orchestrator_leases_acquired_total",
        "run='r'",
        ["0x80 2x39", "0x80 2x39"],  # they take it from each other
    ),
    "MillraceDrivesFail": ("orchestrator", "millrace_orchestrator_drives_failed_total", "run='r'", ["0x80 4x39"]),
    "MillraceRunFailed": ("orchestrator", "millrace_orchestrator_runs_failed_total", "component='x'", ["0x80 1x39"]),
    "MillraceWorkersLost": (
        "orchestrator",
        "millrace_orchestrator_workers_lost_total",
        "kind='env-server',reason='WORKER_LOST'",
        ["0x80 4x39"],
    ),
    "MillraceEnvWorkersDie": ("env-server", "millrace_env_server_worker_deaths_total", "env='e'", ["0x80 6x39"]),
    "MillraceRestarts": ("orchestrator", "process_start_time_seconds", "", ["10x70 4300 4301 4302 4900 4901x40"]),
    "MillraceReplicaBehind": ("orchestrator", "millrace_orchestrator_replica_lag_versions", "run='r'", ["9x120"]),
    "MillraceWaitOverdue": ("trainer", "millrace_waits_overdue", "waits_on='redis'", ["1x120"]),
    "MillraceRedisAway": ("env-server", "millrace_wait_oldest_seconds", "waits_on='redis'", ["0+60x120"]),
    "MillraceSpoolGrows": ("env-server", "millrace_env_server_rollouts", "state='unappended'", ["1+5x120"]),
    "MillraceTrainerFailed": ("trainer", "millrace_trainer_runs_failed_total", "", ["0x80 1x39"]),
    "MillraceServiceDown": ("orchestrator", "up", "", ["0x120"]),
}


@pytest.mark.parametrize("alert", _BAD)
def test_alerts_are_raised(render, alert, tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    (item,) = render("multi-node").of_kind("PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(item["spec"]))
    component, name, labels, pods = _BAD[alert]
    target = f"namespace='rl',service='demo-millrace-{component}-metrics'"
    series = [
        {"series": f"{name}{{{target},pod='p{number}',{labels}}}".replace("'", '"'), "values": values}
        for number, values in enumerate(pods)
    ]
    expected = f"count(ALERTS{{alertname='{alert}',alertstate='firing'}})".replace("'", '"')
    sample = [{"expr": expected, "eval_time": "90m", "exp_samples": [{"labels": "{}", "value": 1}]}]
    other = f'count(ALERTS{{alertname!="{alert}"}}) or vector(0)'
    if alert not in ("MillraceRedisAway", "MillraceWaitOverdue"):
        sample.append({"expr": other, "eval_time": "90m", "exp_samples": [{"labels": "{}", "value": 0}]})
    test = {
        "rule_files": ["rules.yaml"],
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": sample}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    command = [promtool, "test", "rules", tmp_path / "test.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scalers_use_metrics_that_exist(render, exported):
    made = render("multi-node")
    engine, rollouts = made.one("ScaledObject", "inference"), made.one("ScaledObject", "env-server")
    (trigger,) = engine["spec"]["triggers"]
    assert _metrics(trigger["metadata"]["query"]) == {"vllm:num_requests_waiting"}
    targets = {
        trigger["metadata"]["query"]: trigger["metadata"]["threshold"] for trigger in rollouts["spec"]["triggers"]
    }
    assert sorted(targets.values()) == ["32", "384"], "queued for each env-server, and 75 % of its capacity"
    assert all(_metrics(query) == {"millrace_env_server_rollouts"} for query in targets)
    made = render("external-stores")
    (metric,) = made.one("HorizontalPodAutoscaler", "inference")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in exported["inference"]
    metric, cpu = made.one("HorizontalPodAutoscaler", "env-server")["spec"]["metrics"]
    assert exported["env-server"][metric["pods"]["metric"]["name"]] == {"state"}
    assert cpu["type"] == "ContainerResource"


def test_a_scaler_without_numbers_leaves_everything_as_it_is(render):
    """KEDA takes an empty answer for 0 by default: a Prometheus that lost its targets would end the env-servers."""
    triggers = [t for item in render("multi-node").of_kind("ScaledObject") for t in item["spec"]["triggers"]]
    assert len(triggers) == 3
    for trigger in triggers:
        assert trigger["metadata"]["ignoreNullValues"] == "false", "a text: KEDA's metadata holds nothing else"


@pytest.mark.parametrize("case", WITH_RULES)
def test_who_scrapes_gets_in(render, case):
    """Every port that a ServiceMonitor names is open to the clients that the values name."""
    made = render(case)
    for monitor in made.of_kind("ServiceMonitor"):
        component = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        port = {"metrics": 9090, "http": 8000}[monitor["spec"]["endpoints"][0]["port"]]
        rules = made.one("NetworkPolicy", component)["spec"]["ingress"]
        peers = [p for r in rules if port in [at["port"] for at in r.get("ports", [])] for p in r["from"]]
        assert any("namespaceSelector" in peer for peer in peers), f"{component}: {peers}"


def test_without_policies_nobody_has_to_be_named(render):
    assert render("minimal", "monitoring.serviceMonitor.enabled=true").of_kind("ServiceMonitor")


@pytest.mark.parametrize("case", WITH_RULES)
def test_prometheus_scrapes_each_pod_once_and_with_a_token(render, case):
    made = render(case)
    scraped = {}
    for monitor in made.of_kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [s for s in made.of_kind("Service") if wanted.items() <= s["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["scheme"] == "https" and endpoint["path"] == "/metrics"
        secret = {"multi-node": "scrape-token", "external-stores": "rl-worker-token"}[case]
        assert endpoint["authorization"]["credentials"] == {"name": secret, "key": "token"}
        scraped[wanted["app.kubernetes.io/component"]] = endpoint["port"]
    assert scraped == SCRAPED


def test_the_names_that_prometheus_expects_are_in_the_certificate(render):
    made = render("multi-node")
    names = made.of_kind("Certificate")[0]["spec"]["dnsNames"]
    for monitor in made.of_kind("ServiceMonitor"):
        host = monitor["spec"]["endpoints"][0]["tlsConfig"]["serverName"]
        assert host in names or f"*.{host.partition('.')[2]}" in names, host


def test_the_scrapers_token_reaches_every_pod_and_the_workers_stays_apart(render):
    made = render("multi-node")
    for component in SCRAPED:
        container = made.pod(component).spec["containers"][0]
        environ = {item["name"]: item.get("value") for item in container["env"]}
        assert environ["MILLRACE_METRICS_TOKEN_FILE"] == "/etc/millrace/metrics-token/token"
        volumes = {item["name"]: item for item in made.pod(component).spec["volumes"]}
        assert volumes["metrics-token"]["secret"]["secretName"] == "scrape-token"


def test_only_the_scraper_reaches_the_metrics_port(render):
    made = render("multi-node")
    for component in ("orchestrator", "env-server", "trainer"):
        rules = made.one("NetworkPolicy", component)["spec"]["ingress"]
        (rule,) = [rule for rule in rules if 9090 in [port["port"] for port in rule.get("ports", [])]]
        assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    for component in ("orchestrator", "env-server", "trainer"):
        assert "9090" not in json.dumps(render("cpu").one("NetworkPolicy", component)), "nobody is named, nobody comes"


def test_metrics_can_be_switched_off(render):
    made = render("cpu", "monitoring.metrics.enabled=false")
    assert "9090" not in json.dumps(made.objects) and "METRICS" not in json.dumps(made.objects)


def test_the_metrics_are_never_published(render):
    made = render("cpu", "orchestrator.service.type=LoadBalancer")
    published = made.one("Service", "orchestrator")
    assert [port["name"] for port in published["spec"]["ports"]] == ["grpc"]
    assert made.one("Service", "orchestrator-metrics")["spec"]["clusterIP"] == "None"


def test_the_documentation_lists_every_metric_and_no_other(exported):
    section = DOCS.read_text().partition("## Metrics")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(millrace_\w+)`", section))
    ends = re.compile(r"_(bucket|sum|count)$")
    assert listed == {ends.sub("", name) for service in exported.values() for name in service}
