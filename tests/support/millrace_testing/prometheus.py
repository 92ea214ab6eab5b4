"""A real Prometheus on this machine, which scrapes what it is told while it runs."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millrace.local.redis import die_with_parent, free_port

READY_S = 60.0
ANSWER_S = 20.0


@dataclass(frozen=True)
class Prometheus:
    """A server, and the file that names what it scrapes."""

    url: str
    targets: Path

    def scrape(self, targets: Mapping[str, str]) -> None:
        """Scrape these services from now on, given their URLs of metrics, all labelled with the namespace `test`."""
        groups = [
            {
                "targets": [urllib.parse.urlsplit(url).netloc],
                "labels": {
                    "namespace": "test",
                    "service": service,
                    "__metrics_path__": urllib.parse.urlsplit(url).path,
                },
            }
            for service, url in targets.items()
        ]
        fresh = self.targets.with_suffix(".new")
        fresh.write_text(json.dumps(groups))
        fresh.rename(self.targets)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return what an expression gives now; fails where Prometheus does not understand it."""
        return self._ask("query", query=expression)["result"]

    def label_values(self, metric: str, label: str) -> set[str]:
        """Return what Grafana's `label_values(metric, label)` does."""
        return {each[label] for each in self._ask("series", **{"match[]": metric}) if label in each}

    def _ask(self, what: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {error.read().decode()}")


@contextlib.contextmanager
def prometheus(directory: Path) -> Iterator[Prometheus]:
    """Run it in a directory of its own; skips where the program is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus: run scripts/install_prometheus.sh (Debian: apt-get install prometheus)")
    directory.mkdir(parents=True)
    targets = directory / "targets.json"
    targets.write_text("[]")
    sd = [{"files": [str(targets)], "refresh_interval": "1s"}]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "millrace", "file_sd_configs": sd}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, process, directory / "prometheus.log")
        yield Prometheus(url, targets)
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=ANSWER_S):
            return
        if process.poll() is not None or time.monotonic() > ends:
            pytest.fail(f"prometheus did not start: {log.read_text()[-2000:]}")
        time.sleep(0.1)
