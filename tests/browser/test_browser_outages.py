"""Why a run waits as a picture, and pages while the store or Redis is away: they keep what they have, and say so."""

import os

import pytest

from millrace_testing.dashboard import HOSTILE, RUN

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
WAIT_MS = 60_000
PAGES = {
    "/": "text=ended-1",
    f"/runs/{RUN}": "figure svg text.tick",
    f"/runs/{RUN}/samples": "table.samples tbody tr >> nth=5",
    f"/runs/{RUN}/lineage?sample=3-1": "text=sampled its tokens",
    f"/runs/{RUN}/timeline": ".lanes svg rect",
}

WITHOUT_THE_STORE = PAGES | {f"/runs/{RUN}/lineage?sample=3-1": "text=cannot read"}
"""The tokens of a sample are in its batch only: a page that needs them says that it cannot read it."""


@pytest.fixture
def page(browser, served):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    found = context.new_page()
    found.failures = []
    found.on("pageerror", lambda error: found.failures.append(str(error)))
    found.base = served.url
    yield found
    context.close()


def box(name, does, state="waits", **more):
    return {"name": name, "does": does, "state": state, "age_seconds": 3.0, "deadline_seconds": 60.0} | more


def test_why_a_run_waits_is_a_picture(page, served):
    """Boxes from left to right, below each other where it is narrow, in words for those who hear the page."""
    served.source.chain = [
        box("trainer-0", "waits for batch 12"),
        box("inf-0", "waits for model m to be loaded: 3.1 of 8.0 GB (39 %)", "overdue"),
        box(HOSTILE[0], HOSTILE[2], "silent"),
    ]
    page.goto(f"{page.base}/runs/{RUN}")
    page.wait_for_selector(".why-box >> nth=2")
    texts = page.locator(".why-box").all_inner_texts()
    assert "waits 3.0 s of 60.0 s" in texts[0] and "3.1 of 8.0 GB" in texts[1] and "overdue" in texts[1]
    assert HOSTILE[0] in texts[2] and "U+202E" in texts[2]
    assert page.evaluate("window.hacked") is None and page.query_selector(".why script") is None
    assert "waits for whom" in page.get_attribute("ol.why", "aria-label")
    places = page.eval_on_selector_all(".why-box", "all => all.map((each) => each.getBoundingClientRect().x)")
    assert places == sorted(places) and len(set(places)) == 3
    page.set_viewport_size({"width": 380, "height": 800})
    places = page.eval_on_selector_all(".why-box", "all => all.map((each) => each.getBoundingClientRect().x)")
    assert len(set(places)) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 381
    assert page.failures == []


def test_every_page_while_the_store_is_away(page, served, run_writer, tmp_path):
    """What was read stays on all pages, with the reason in the banner, which goes when the store is back."""
    for path, wanted in PAGES.items():
        page.goto(page.base + path)
        page.wait_for_selector(wanted)
    store, hidden = tmp_path / "store", tmp_path / "hidden"
    store.rename(hidden)
    os.symlink(store, store)  # a link to itself: whoever opens it gets an error
    page.goto(f"{page.base}/runs/{RUN}/samples")
    page.wait_for_selector("#banner:not([hidden])")
    assert "the page shows what was read before" in page.inner_text("#banner")
    for path, wanted in WITHOUT_THE_STORE.items():
        page.goto(page.base + path)
        page.wait_for_selector(wanted)
    store.unlink()
    hidden.rename(store)
    page.goto(f"{page.base}/runs/{RUN}/samples")
    page.wait_for_selector("#banner", state="hidden")
    assert page.failures == []


@pytest.mark.parametrize("path", PAGES)
def test_every_page_while_redis_is_away(page, served, path):
    served.source.words = "Redis does not answer for 12 s"
    page.goto(page.base + path)
    page.wait_for_selector(PAGES[path])
    assert page.failures == []
    page.goto(f"{page.base}/runs/{RUN}")
    page.wait_for_selector("#banner:has-text('Redis does not answer')")


def test_fork_and_replay_show_their_commands(page):
    page.goto(f"{page.base}/runs/{RUN}?show=checkpoints")
    page.click("button:has-text('Fork')")
    assert page.inner_text("pre.command") == f"millrace run fork {RUN} --step 2"
    page.reload()
    page.click("button:has-text('Replay')")
    assert page.inner_text("pre.command") == f"millrace run replay {RUN} --step 2"


def test_curves_of_two_runs_share_a_plot(page):
    page.goto(f"{page.base}/compare?runs={RUN},ended-1")
    page.wait_for_selector("figure svg polyline.line >> nth=1", state="attached")
    first = page.locator("figure").first
    assert first.locator("polyline.line").count() == 2
    assert RUN in first.inner_text() and "ended-1" in first.inner_text()
