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
    """Yield chromium, driven by Playwright."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: `make test-browser` installs it"
    )
    if CHROMIUM is None:
        pytest.skip("there is no chromium: `make test-browser` installs it on Debian")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def write_run(directory: Path) -> RunWriter:
    """Write the first steps of a run with hostile completions."""
    writer = RunWriter(store=LocalStore(directory), members=len(HOSTILE) + 1)
    for step in range(STEPS):
        writer.step(step, HOSTILE)
    return writer


def serve(writer: RunWriter, index: Path) -> ServedInThread:
    """Return a dashboard over that live run and one that has ended; it runs while it is entered."""
    ended = known_run("ended-1", state="SUCCEEDED", step=STEPS, max_steps=STEPS)
    return ServedInThread(writer.store, index, source=KnownRuns([known_run(step=STEPS), ended]))


@pytest.fixture
def run_writer(tmp_path: Path) -> RunWriter:
    """Return a run with hostile completions, of which the first steps are written."""
    return write_run(tmp_path / "store")


@pytest.fixture
def served(run_writer: RunWriter, tmp_path: Path) -> Iterator[Served]:
    """Yield a dashboard over a live run and one that has ended."""
    with serve(run_writer, tmp_path / "index") as found:
        yield found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield the same dashboard for all tests that only look at it."""
    directory = tmp_path_factory.mktemp("shared")
    writer = write_run(directory / "store")
    with serve(writer, directory / "index") as found:
        yield found


@pytest.fixture
def page(browser, request: pytest.FixtureRequest) -> Iterator:
    """Yield a page that fails the test for whatever the browser complains of.

    It is of a dashboard of the test's own only where the test asks for `served` or `run_writer`, to change them.
    """
    is_changed = {"served", "run_writer"} & set(request.fixturenames)
    served: Served = request.getfixturevalue("served" if is_changed else "shared")
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
