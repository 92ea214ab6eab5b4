"""Reads the metrics of a one-machine stack while something else uses it, as a Prometheus would."""

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PERIOD_S = 0.5
ANSWER_S = 20.0

Samples = dict[tuple[str, str], float]
"""Value by name and labels, the latter as `a=x,b=y` in order of their names."""


def parse(text: str) -> Samples:
    """Return the samples of one answer."""
    return {
        (sample.name, ",".join(f"{key}={sample.labels[key]}" for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Scrapes:
    """What each service answered, in order."""

    def __init__(self) -> None:
        self.by_service: dict[str, list[Samples]] = {}

    def values(self, service: str, name: str, labels: str = "") -> list[float]:
        """Return the values of one series over time, where it was there."""
        return [one[name, labels] for one in self.by_service.get(service, []) if (name, labels) in one]

    def names(self, service: str) -> set[str]:
        """Return every name that it ever showed."""
        return {name for one in self.by_service.get(service, []) for name, _ in one}


@contextlib.contextmanager
def scraping(directory: Path) -> Iterator[Scrapes]:
    """Scrape the stack whose `stack.json` appears below the directory, every half second."""
    found, over = Scrapes(), threading.Event()

    def scrape() -> None:
        while not over.wait(PERIOD_S):
            for path in directory.glob("**/stack.json"):
                with contextlib.suppress(OSError, ValueError):  # it starts or ends
                    for service, url in json.loads(path.read_text())["metrics"].items():
                        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                            found.by_service.setdefault(service, []).append(parse(answer.read().decode()))

    thread = threading.Thread(target=scrape, name="scraper")
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
