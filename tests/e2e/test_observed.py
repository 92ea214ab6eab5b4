"""A live run as others see it: every query of the Grafana dashboard has data, and its traces are whole."""

import contextlib
import json
import math
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from millrace_testing.collector import Collector, collecting
from millrace_testing.prometheus import Prometheus, prometheus

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
DASHBOARD = Path(__file__).parents[2] / "charts" / "millrace" / "files" / "grafana-dashboard.json"
STEPS = 30
WITHIN_S = 500.0
SLOW_FROM = 10
"""From this step on the collector answers nothing until the run has ended and its command waits for that."""
VARIABLES = {"$namespace": "test", "$run": ".*", "$__rate_interval": "1m"}
"""As Grafana fills them in: everything, and a window of several scrapes."""


def queries() -> dict[str, str]:
    """Return the dashboard's expressions by panel and expression.

    Those of vLLM need a GPU, or `make test-vllm`'s engine.
    """
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            if "vllm:" not in expression:
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                found[f"{panel['title']}: {target['expr']}"] = expression
    return found


def kill_env_worker(directory: Path) -> None:
    """One death for the panel that counts them."""
    pids = json.loads((directory / "outputs" / "observed" / "stack.json").read_text())["pids"]
    for child in psutil.Process(pids["env-server"]).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "millrace.env_server.workers.env_worker" in " ".join(child.cmdline()):
                os.kill(child.pid, signal.SIGKILL)
                return


def has_data(server: Prometheus, expression: str) -> bool:
    return any(math.isfinite(float(each["value"][1])) for each in server.query(expression))


def test_the_dashboards_queries_and_a_collector_get_what_they_ask_of_a_live_run(warm, tmp_path) -> None:
    collector, missing, scraped, has_killed = Collector(), queries(), False, False
    assert len(missing) > 15 and not any("$" in expression for expression in missing.values())
    with prometheus(tmp_path / "prometheus") as server, collecting(collector):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
        argv = ("rl", "@", warm.rl_toml, "--name", "observed", "--max-steps", str(STEPS))
        with warm.following(*argv, stdout=(tmp_path / "out").open("w"), env=variables) as process:
            ends = time.monotonic() + WITHIN_S
            while process.poll() is None and time.monotonic() < ends:
                for path in () if scraped else warm.path.glob("outputs/observed/stack.json"):
                    server.scrape(json.loads(path.read_text())["metrics"])
                    scraped = True
                missing = {name: each for name, each in missing.items() if not has_data(server, each)}
                if scraped and not has_killed and server.query("millrace_orchestrator_step >= 3"):
                    kill_env_worker(warm.path)
                    has_killed = True
                if "waiting for the collector of traces" in (tmp_path / "out").read_text():
                    collector.answers.set()
                elif server.query(f"millrace_orchestrator_step >= {SLOW_FROM}"):
                    collector.answers.clear()
                time.sleep(1)
            assert process.poll() == 0, (tmp_path / "out").read_text()[-3000:]
        assert not missing
        assert server.label_values("millrace_runs", "namespace") == {"test"}
        assert server.label_values("millrace_orchestrator_step", "run") == {"observed"}
    check_trace(collector)
    check_logs(warm.path)


def check_trace(collector: Collector) -> None:
    """The trace of a step in the middle: from a task to the version that came of it, one before the other."""
    (step,) = collector.named(f"step {STEPS // 2}")
    own = {span.span_id: span for span in collector.spans if span.trace_id == step.trace_id}
    kinds = {re.sub(r"[-\d]+.*", "", span.name).strip() for span in own.values()}
    assert kinds == {"step", "task", "rollout", "generation", "environment", "batch", "training step"} | {
        "publish version",
        "serve version",
    }
    by_kind = {span.name.split()[0]: span for span in own.values()}
    generation = by_kind["generation"]
    rollout = own[generation.parent_span_id]
    task = own[rollout.parent_span_id]
    assert rollout.name.startswith("rollout") and task.name.startswith("task") and task.parent_span_id == step.span_id
    for name in ("batch", "training", "publish", "serve"):
        assert by_kind[name].parent_span_id == step.span_id
    order = [by_kind[name].end_time_unix_nano for name in ("batch", "training", "publish", "serve")]
    assert order == sorted(order)


def check_logs(directory: Path) -> None:
    """A file per service, in which lines name the run that they are about."""
    logs = directory / "outputs" / "observed" / "logs"
    for service in ("orchestrator", "env-server", "inference", "trainer"):
        text = (logs / f"{service}.log").read_text()
        assert re.search(r" run=\S+", text), service
