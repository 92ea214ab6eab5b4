"""A real Chromium, as the distribution has it; the tests are skipped, with the reason, where there is none."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.storage.local import LocalStore
from millrace_testing.dashboard import HOSTILE, KnownRuns, RunWriter, Served, ServedInThread, known_run

CHROMIUM = os.environ.get("MILLRACE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
STEPS = 6
WAIT_MS = 60_000


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Chromium, driven by Playwright."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: `make test-browser` installs it"
    )
    if CHROMIUM is None:
        pytest.skip("there is no chromium: `make test-browser` installs it on Debian")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def run_writer(tmp_path: Path) -> RunWriter:
    """A run with hostile completions, of which the first steps are written."""
    writer = RunWriter(store=LocalStore(tmp_path / "store"), members=len(HOSTILE) + 1)
    for step in range(STEPS):
        writer.step(step, HOSTILE)
    return writer


@pytest.fixture
def served(run_writer: RunWriter, tmp_path: Path) -> Iterator[Served]:
    """A dashboard over a live run and one that has ended."""
    ended = known_run("ended-1", state="SUCCEEDED", step=STEPS, max_steps=STEPS)
    source = KnownRuns([known_run(step=STEPS), ended])
    with ServedInThread(run_writer.store, tmp_path / "index", source=source) as found:
        yield found


@pytest.fixture
def page(browser, served: Served) -> Iterator:
    """A page that fails the test for whatever the browser complains of."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    found = context.new_page()
    found.complaints = []
    found.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.on("console", lambda said: found.complaints.append(said.text) if said.type in ("error", "warning") else None)
    found.requested = []
    found.on("request", lambda asked: found.requested.append(asked.url))
    found.base = served.url
    yield found
    context.close()
