"""Pictures of every page: python tests/browser/screenshots.py DIRECTORY [--url URL --run RUN --other RUN --sample ID].

Without --url it serves a small run of its own. Light, dark and narrow, each page once.
"""

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

from millrace.storage.local import LocalStore
from millrace_testing.dashboard import RUN, KnownRuns, RunWriter, ServedInThread, known_run

CHROMIUM = os.environ.get("MILLRACE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
STEPS = 40
WHY = [
    {"name": name, "does": does, "state": state, "age_seconds": age_s, "deadline_seconds": deadline_s}
    for name, does, state, age_s, deadline_s in (
        ("trainer-0", "waits for batch 40", "waits", 41.0, 60.0),
        ("orchestrator-0", "waits for 3 of 8 groups for batch 40", "waits", 40.2, 0.0),
        ("env-server-0", "waits for 24 rollouts of letters with the engine", "waits", 38.0, 900.0),
        ("inference-1", "waits for policy 39 to be downloaded: 3.1 of 8.0 GB (39 %)", "overdue", 71.0, 60.0),
        ("object store", "sends at 1.2 MB/s", "end", 0.0, 0.0),
    )
]
LOOKS = {"light": (1280, 900), "dark": (1280, 900), "narrow": (400, 800)}


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The URL of a dashboard over a run of some steps."""
    with tempfile.TemporaryDirectory() as place:
        store = LocalStore(Path(place) / "store")
        writer = RunWriter(store=store, members=9)
        for step in range(STEPS):
            writer.step(step)
        runs = [known_run(step=STEPS, max_steps=STEPS), known_run("letters-0", state="SUCCEEDED", step=STEPS)]
        with ServedInThread(store, Path(place) / "index", source=KnownRuns(runs, chain=WHY)) as found:
            yield found.url


def take(url: str, run: str, other: str, sample: str, directory: Path) -> None:
    """One file for each page and look."""
    pages = {
        "runs": "/", "run": f"/runs/{run}", "config": f"/runs/{run}?show=config", "events": f"/runs/{run}?show=events",
        "checkpoints": f"/runs/{run}?show=checkpoints", "workers": f"/runs/{run}?show=workers",
        "audit": f"/runs/{run}?show=audit", "samples": f"/runs/{run}/samples",
        "sample": f"/runs/{run}/samples/{sample}", "side": f"/runs/{run}/samples/{sample}?side=1",
        "lineage": f"/runs/{run}/lineage?sample={sample}",
        "version": f"/runs/{run}/lineage?version=5", "timeline": f"/runs/{run}/timeline", "login": "/login",
        "compare": f"/compare?runs={run},{other}",
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for look, (width, height) in LOOKS.items():
            scheme = "dark" if look == "dark" else "light"
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(f"{url}/runs/{run}/samples")
            page.wait_for_selector("text=batches are indexed", timeout=60_000)  # whole curves, and sparklines
            for name, path in pages.items():
                page.goto(url + path)
                page.wait_for_selector(".loading", state="detached", timeout=60_000)
                page.wait_for_timeout(1500)
                page.screenshot(path=directory / f"{name}-{look}.png")
                print(directory / f"{name}-{look}.png")
        browser.close()


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--run", default=RUN)
    parser.add_argument("--other", default="letters-0", help="What the run is compared with.")
    parser.add_argument("--sample", default="5-3")
    given = parser.parse_args()
    with contextlib.nullcontext(given.url) if given.url else served() as url:
        take(url.rstrip("/"), given.run, given.other, given.sample, given.directory)


if __name__ == "__main__":
    main()
