"""Alerts and scalers look at metrics that exist."""

import re
from pathlib import Path

SERVER = Path(__file__).parents[2] / "services" / "millrace" / "inference"
# vLLM's own names (vllm/v1/metrics/loggers.py of 0.32).
VLLM = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:generation_tokens_total"}


def _ours() -> set[str]:
    """The names that `GET /metrics` of the embedded engine writes."""
    text = "".join(path.read_text() for path in SERVER.glob("*.py"))
    return {f"millrace_inference_{name}" for name in re.findall(r'\("(\w+)", "(?:gauge|counter)",', text)}


def _metrics(expression: str) -> set[str]:
    return set(re.findall(r"(?:millrace_|vllm:)\w+", expression))


def test_rules_use_metrics_that_exist(render):
    known = _ours() | VLLM
    assert len(_ours()) >= 6
    for case in ("multi-node", "external-stores"):
        rules = [
            rule for group in render(case).of_kind("PrometheusRule")[0]["spec"]["groups"] for rule in group["rules"]
        ]
        assert len(rules) >= 3
        for rule in rules:
            assert _metrics(rule["expr"]) <= known, rule["alert"]
            assert {"summary", "description"} <= set(rule["annotations"])


def test_scalers_use_metrics_that_exist(render):
    (trigger,) = render("multi-node").of_kind("ScaledObject")[0]["spec"]["triggers"]
    assert _metrics(trigger["metadata"]["query"]) == {"vllm:num_requests_waiting"}
    (metric,) = render("external-stores").one("HorizontalPodAutoscaler", "inference")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in _ours()


def test_prometheus_scrapes_each_engine_once_and_with_a_token(render):
    made = render("external-stores")
    monitor = made.of_kind("ServiceMonitor")[0]["spec"]
    wanted = monitor["selector"]["matchLabels"]
    services = [item for item in made.of_kind("Service") if wanted.items() <= item["metadata"]["labels"].items()]
    (service,) = services
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["scheme"] == "https" and endpoint["authorization"]["credentials"]["name"] == "rl-worker-token"
    rule = made.of_kind("PrometheusRule")[0]["spec"]["groups"][0]["rules"][0]["expr"]
    assert f'service="{service["metadata"]["name"]}"' in rule
