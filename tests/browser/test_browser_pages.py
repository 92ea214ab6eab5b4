"""Every page in a real browser: it shows what it should, obeys nothing that a model wrote, and outlives the server."""

import json
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from millrace.rpc.access import ServerAccess
from millrace.rpc.tokens import new_token, token_line
from millrace.telemetry.settings import Settings
from millrace.v1 import event_pb2
from millrace_testing.dashboard import HOSTILE, RUN, SECRET, ServedInThread, opened
from millrace_testing.polling import block_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
WAIT_MS = 60_000
STEPS = 6
PAGES = {
    "/": "text=ended-1",
    f"/runs/{RUN}": "figure svg text.tick",
    f"/runs/{RUN}?show=config": "text=model.name",
    f"/runs/{RUN}?show=events": "table.events",
    f"/runs/{RUN}?show=checkpoints": "text=file:///c/2",
    f"/runs/{RUN}?show=audit": "text=CHAIN_BROKEN",
    f"/runs/{RUN}/samples": "table.samples tbody tr >> nth=5",
    f"/runs/{RUN}/samples/3-1": ".token",
    f"/runs/{RUN}/samples/3-1?side=1": ".members .member >> nth=7",
    f"/runs/{RUN}/lineage?sample=3-1": "text=sampled its tokens",
    f"/runs/{RUN}/lineage?version=2": "text=Policy v3",
    f"/runs/{RUN}/timeline": ".lanes svg rect",
    f"/compare?runs={RUN},ended-1": "figure svg text.tick",
}


def demanding(directory, *, may_write=True):
    """A token, and an access that demands it."""
    token, path = new_token(), directory / "tokens"
    path.write_text(token_line(token, "ada", may_write=may_write) + "\n")
    return token, ServerAccess.of(Settings(tokens_file=str(path)))


def logged_in(context, served, token):
    """A page on which somebody has typed a token."""
    found = context.new_page()
    found.goto(served.url)
    found.fill("#token", token)
    found.click("button")
    found.wait_for_selector("table.runs", timeout=WAIT_MS)
    return found


@pytest.mark.parametrize("path", PAGES)
def test_a_page_shows_what_it_is_about(page, path):
    opened(page, path, PAGES[path])
    page.wait_for_timeout(300)
    assert page.complaints == []
    assert all(url.startswith(page.base) for url in page.requested)


def test_what_models_wrote_is_text(page):
    for at, said in enumerate(HOSTILE):
        opened(page, f"/runs/{RUN}/samples/2-{at}", ".message.assistant")
        shown = page.inner_text(".message.assistant")
        if said.isascii() and said.isprintable() and len(said) < 1000 and "key is" not in said:
            assert said.split("\n")[0] in shown
        assert page.query_selector(".message script, .message img") is None
        assert page.evaluate("window.hacked") is None
    assert page.complaints == []


def test_the_list_says_where_a_run_waits(page, served):
    place = "place 2 of 2: what is free is kept for run <b>gang</b>"
    served.source.runs[0] |= {"state": "QUEUED", "held_by": [], "queue_place": place}
    opened(page, "/", "small.queue")
    assert page.inner_text("small.queue") == place and page.complaints == []


def ticks_of(page, points: list[list[float]]) -> list[str]:
    """Return the texts beside the axes of a curve."""
    return page.evaluate(
        """async (points) => {
          const { chart } = await import("/static/charts.js");
          const drawn = chart("t", [{ name: "a", points }]);
          document.body.append(drawn);
          await new Promise((done) => setTimeout(done, 300));
          return [...drawn.querySelectorAll("text.tick")].map((tick) => tick.textContent);
        }""",
        points,
    )


def test_a_curve_of_rounding_errors_is_a_line(page):
    """Between 0.3 and 0.1 + 0.2 there is no room for ticks: looking for them never ended."""
    opened(page, "/", "text=ended-1")
    assert 2 < len(ticks_of(page, [[0, 0.3], [1, 0.1 + 0.2]])) < 12
    assert page.complaints == []


def test_a_mark_that_stands_alone_has_digits(page):
    opened(page, "/", "text=ended-1")
    assert "0.005" in ticks_of(page, [[0, 7e-14], [1, 0.00998]])


def test_reasoning_without_an_end_freezes_no_page(page, run_writer):
    run_writer.step(STEPS, ["<think>" * 9000])
    opened(page, f"/runs/{RUN}/samples", f"text={STEPS + 1} batches are indexed")
    page.goto(page.base + f"/runs/{RUN}/samples/{STEPS}-0")
    page.wait_for_selector(".message.assistant")
    assert page.locator(".message.assistant details").count() == 0


@pytest.mark.parametrize("path", ["samples/3-1", "lineage?sample=3-1"])
def test_a_link_to_a_sample_waits_until_its_batch_is_read(page, path):
    growing = {"error": {"reason": "INDEX_GROWING", "message": "3 of 6 batches of the run are read"}}
    left = [growing, growing]

    def answer(route):
        if left:
            route.fulfill(status=202, json=left.pop())
        else:
            route.continue_()

    page.route(lambda url: url.endswith(f"/api/runs/{RUN}/{path}"), answer)
    page.goto(f"{page.base}/runs/{RUN}/{path}")
    page.wait_for_selector("text=3 of 6 batches of the run are read")
    page.wait_for_selector(PAGES[f"/runs/{RUN}/{path}"])
    assert not left


def test_a_group_stands_side_by_side(page):
    """Every member with what it answered, what all were asked once; keys and links lead there and back."""
    opened(page, f"/runs/{RUN}/samples/3-1", ".token")
    page.keyboard.press("g")
    page.wait_for_selector(".members .member >> nth=7")
    assert page.url.endswith("/samples/3-1?side=1")
    asked, members = page.locator(".panel:has(.members) > .chat"), page.locator(".members .member")
    assert asked.locator(".message.user").count() == 1 and members.locator(".message.user").count() == 0
    assert members.locator(".message.assistant").count() == members.count()
    assert "Member 2" in page.inner_text(".member.here") and HOSTILE[0] in page.inner_text(".members")
    assert page.query_selector(".members script, .members img") is None and page.evaluate("window.hacked") is None
    page.keyboard.press("j")
    page.wait_for_selector(".member.here:has-text('Member 3')")
    page.click("a:has-text('This one alone')")
    page.wait_for_selector(".columns .chat")
    assert page.complaints == []


def test_a_long_line_is_folded_and_opens(page):
    at = next(at for at, said in enumerate(HOSTILE) if len(said) > 10_000)
    opened(page, f"/runs/{RUN}/samples/2-{at}", ".more")
    before = len(page.inner_text(".message.assistant"))
    page.click(".more")
    assert len(page.inner_text(".message.assistant")) > 10 * before


def test_tokens_are_coloured_by_the_difference_of_trainer_and_engine(page, run_writer):
    """Differences of a quarter, a half and three quarters; the two tokens of the prompt have none."""
    run_writer.token_log(2, members=[1])
    opened(page, f"/runs/{RUN}/samples/2-1", ".token")
    page.select_option("select[aria-label='Colour tokens by']", "difference")
    page.wait_for_selector("text=mean 0.5000, largest 0.7500, over 3 tokens")
    colours = page.eval_on_selector_all(".token", "all => all.map((each) => each.style.backgroundColor)")
    assert colours[:2] == ["", ""] and len(set(colours[2:])) == 3 and "" not in colours[2:]
    page.hover(".token >> nth=2")
    assert "trainer -0.250 (+0.2500), entropy 1.500" in page.inner_text(".readout")
    opened(page, f"/runs/{RUN}/samples/2-0", ".token")
    page.select_option("select[aria-label='Colour tokens by']", "difference")
    page.wait_for_selector("text=No difference to show: of batch 2, 1 of 8 rollouts are stored")
    page.click(".note a:has-text('2-1')")
    page.wait_for_selector("h1:has-text('Sample 2-1')")
    assert page.complaints == []


def test_filters_stand_in_the_address(page):
    opened(page, f"/runs/{RUN}/samples?outcome=failed", "table.samples tbody tr")
    assert set(page.locator("table.samples tbody tr td:nth-child(5)").all_inner_texts()) == {"env_error"}
    page.select_option("select >> nth=0", "trained")
    page.wait_for_selector("table.samples tbody tr:first-child td:nth-child(5):has-text('trained')")
    assert "outcome=trained" in page.url
    page.reload()
    page.wait_for_selector("table.samples tbody tr")
    assert set(page.locator("table.samples tbody tr td:nth-child(5)").all_inner_texts()) == {"trained"}


def late(page, wanted):
    """Keep back the first answer to a question that asks for `wanted`, a key with its value; give what lets it go."""
    kept, taken = [], []

    def answer(route):
        if not taken and wanted in urlsplit(route.request.url).query.split("&"):
            taken.append(route)  # at once: others are asked while the answer is on its way
            kept.append((route, route.fetch()))
        else:
            route.continue_()

    def let_go():
        while not kept:  # the test's own limit of time ends it
            page.wait_for_timeout(50)
        route, response = kept[0]
        with page.expect_event("requestfinished", lambda request: request == route.request):
            route.fulfill(response=response)
        page.wait_for_timeout(300)  # as long as drawing takes

    page.route("**/api/**", answer)
    return let_go


def test_a_late_answer_is_not_drawn_under_a_newer_filter(page):
    opened(page, "/runs/ended-1/samples", "table.samples tbody tr")
    let_go = late(page, "outcome=failed")
    page.select_option("select >> nth=0", "failed")
    with page.expect_response("**/*outcome=trained*"):
        page.select_option("select >> nth=0", "trained")
    let_go()
    assert set(page.locator("table.samples tbody tr td:nth-child(5)").all_inner_texts()) == {"trained"}


def test_a_late_answer_is_not_drawn_under_a_newer_kind_of_events(page):
    opened(page, "/runs/ended-1?show=events", "table.events")
    let_go = late(page, "kinds=checkpoint_saved")
    kinds = "[aria-label='Kind of events']"
    page.select_option(kinds, "checkpoint_saved")
    page.select_option(kinds, "step_completed")
    steps = "table.events tbody tr:first-child td:nth-child(3):has-text('step completed')"
    page.wait_for_selector(steps)
    let_go()
    assert set(page.locator("table.events tbody tr td:nth-child(3)").all_inner_texts()) == {"step completed"}


def test_a_late_answer_is_not_drawn_as_a_newer_timeline(page, run_writer):
    for step in range(STEPS, 2 * STEPS):
        run_writer.step(step)
    early = event_pb2.Event(warning=event_pb2.Warning(reason="GROUPS_STALE", message="early"))
    run_writer.archive((run_writer.clock + 1, early))  # a mark that five steps do not have
    opened(page, "/runs/ended-1/timeline", f"text=Steps 0–{2 * STEPS - 1}")
    let_go = late(page, "steps=5")
    choice = "[aria-label='How many steps']"
    page.select_option(choice, "5")
    with page.expect_response("**/timeline?steps=50"):
        page.select_option(choice, "50")
    let_go()
    assert page.locator(f"text=Steps 0–{2 * STEPS - 1}").count() == 1


def test_evaluations_are_called_by_the_whole_name_of_their_environment(page, run_writer):
    for env in ("org/a", "org/b"):
        done = event_pb2.EvalCompleted(env=env, step=1, reward_mean=0.5)
        run_writer.archive((run_writer.clock, event_pb2.Event(eval_completed=done)))
    opened(page, f"/runs/{RUN}", "text=org/a")
    assert page.locator("text=org/b").count() > 0


def archive_batches(run_writer, *metrics):
    """What batches after those of the run say of their rollouts, one after the other."""
    for step, values in enumerate(metrics, start=STEPS):
        done = event_pb2.BatchCommitted(step=step, num_trained=1, metrics=values)
        run_writer.archive((run_writer.clock, event_pb2.Event(batch_committed=done)))


def chart_of(page, title):
    """The chart with that title, as texts: its legend, what else is above it, and beside its axes."""
    figure = page.locator("figure.chart", has=page.locator(f"strong:text-is('{title}')"))
    figure.locator("text.tick").first.wait_for()
    ticks = figure.locator("text.tick").all_text_contents()
    return figure.locator("figcaption .key").all_inner_texts(), figure.locator(".hint").all_inner_texts(), ticks


def test_each_environment_has_charts_that_say_why_its_reward_is_what_it_is(page, run_writer):
    batch = {}
    for env, share in (("org/a", 0.25), ("org/b", 0.0)):
        batch |= {f"solve_all/{env}": share, f"solve_none/{env}": 0.5, f"is_truncated/{env}/mean": share}
        batch |= {f"reward/{env}/group_std": 0.1, f"num_turns/{env}/mean": 3.0, f"metrics/{env}/num_turns": 3.0}
        batch |= {f"metrics/{env}/exact": share, f"stop_condition/{env}/max_turns": 1.0}
    batch |= {f"metrics/org/b/part-{at:02}": at / 20 for at in range(20)} | {"solve_all/all": 0.125}
    archive_batches(run_writer, batch, batch)
    opened(page, f"/runs/{RUN}", "text=Reward functions of org/b")
    legend, hints, ticks = chart_of(page, "Solved by every rollout of a group")
    assert legend == ["org/a 0.250", "org/b 0"] and hints == ["share of groups"], "and none of all environments"
    assert ticks[0] == "0" and "1.0" in ticks and "batch" in ticks, "a share has a whole axis, which has a name"
    assert chart_of(page, "Reward functions of org/a")[0] == ["exact 0.250"], "turns have a chart of their own"
    legend, hints, _ = chart_of(page, "Reward functions of org/b")
    assert len(legend) == 8 and hints[1].startswith("13 more are not drawn"), "no two lines have one colour"
    assert chart_of(page, "Why rollouts end of org/b")[0] == ["max_turns 1"]
    for title in ("Spread within groups", "Solved by none", "Cut at a token limit", "Turns"):
        assert len(chart_of(page, title)[0]) == 2, title
    assert page.complaints == []


def test_evaluations_name_what_was_not_evaluated(page, run_writer):
    for step, skipped in ((2, []), (8, [4, 6])):
        done = event_pb2.EvalCompleted(env="letters", step=step, policy_version=step, reward_mean=0.5, skipped=skipped)
        run_writer.archive((run_writer.clock, event_pb2.Event(eval_completed=done)))
    opened(page, f"/runs/{RUN}", "text=not evaluated: letters: v4, v6")
    assert "version" in chart_of(page, "Evaluations")[2]
    opened(page, f"/runs/{RUN}?show=events", "text=not evaluated before it: v4, v6")
    assert page.complaints == []


def test_a_sample_shows_what_it_was_scored_with(page, run_writer):
    given = {"answer": HOSTILE[1], "level": 3, "tags": ["a", {"b": None}], "long": "x " * 3000, "key": SECRET}
    scored = replace(run_writer.rollout(STEPS, 0, ()), ordinal=99, task_json=json.dumps(given))
    run_writer.commit(STEPS, more=[scored])
    opened(page, f"/runs/{RUN}/samples?ordinal=99", "table.samples tbody tr >> nth=0")
    page.click("table.samples tbody tr a >> nth=0")
    page.wait_for_selector("text=Scored with")
    table = page.locator("table", has=page.locator("text=Scored with"))
    rows = dict(row.split("\t", 1) for row in table.locator("tbody tr").all_inner_texts())
    assert rows["answer"].strip() == HOSTILE[1] and rows["tags"].strip() == '["a",{"b":null}]'
    assert rows["level"].strip() == "3" and SECRET not in page.inner_text("main")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert table.locator("button.more").count() == 1, "the rest of a long one can be asked for"
    assert page.evaluate("window.hacked") is None and page.complaints == []


def test_runs_are_found_by_their_configs(page):
    opened(page, "/", "text=ended-1")
    page.fill("[aria-label='Find in configs']", "name=ended")
    page.wait_for_selector(f"table.runs >> text={RUN}", state="detached")
    assert page.locator("table.runs tbody tr").count() == 1
    assert page.url.endswith("/?config=name%3Dended")
    page.fill("[aria-label='Find in configs']", "")
    page.wait_for_selector(f"table.runs >> text={RUN}")
    assert page.complaints == []


def test_lineage_names_batches_and_tokens(page):
    opened(page, f"/runs/{RUN}/lineage?sample=3-1", "text=made 3 of its tokens")
    page.click("text=made from batch 1")
    page.wait_for_selector("table.samples tbody tr")
    assert page.url.endswith("/samples?step=1")


def test_a_live_run_gets_ahead_under_the_eyes(page, run_writer, served):
    opened(page, f"/runs/{RUN}/samples", "text=6 batches are indexed")
    run_writer.step(6, HOSTILE)
    page.wait_for_selector("text=7 batches are indexed")
    assert page.inner_text("table.samples tbody td") == "6"


def test_every_page_of_a_finished_run(page):
    for path, wanted in PAGES.items():
        if path.startswith(f"/runs/{RUN}"):
            opened(page, path.replace(RUN, "ended-1", 1), wanted)
            block_until(lambda: not page.evaluate("document.getElementById('live').textContent"), timeout_s=60)
    assert page.complaints == []


def test_a_run_that_is_killed_under_the_eyes(page, run_writer, served):
    run = served.source.runs[0]
    opened(page, f"/runs/{RUN}?show=events", "table.events")
    lost = event_pb2.Warning(reason="WORKER_LOST", message="trainer-0 died: killed by SIGKILL")
    at = run_writer.clock + STEPS * (run_writer.wait_s + run_writer.trainer_s)
    run_writer.archive((at - 1, event_pb2.Event(warning=lost)))
    wait = {
        "owner": "orchestrator",
        "reason": "a trainer",
        "waits_on": "trainer",
        "age_seconds": 3,
        "deadline_seconds": 60,
    }
    run["held_by"], served.source.waits = [], [wait]
    page.wait_for_selector("table.events >> text=killed by SIGKILL")
    page.wait_for_selector(".chain li:has-text('a trainer')")
    assert "nobody" in page.inner_text("dl.facts")
    for path, wanted in PAGES.items():  # nobody trains it at the moment
        opened(page, path, wanted)
    opened(page, f"/runs/{RUN}/timeline", ".lanes svg rect")
    page.wait_for_selector(".lanes line.m-death", state="attached")
    assert "died, was lost" in page.inner_text(".words")
    opened(page, f"/runs/{RUN}", ".state-running")
    run |= {"state": "FAILED", "has_ended": True, "error": {"reason": "NO_TRAINER", "message": "no trainer came back"}}
    page.wait_for_selector(".state-failed")
    assert "no trainer came back" in page.inner_text(".failed")
    assert page.locator("button:has-text('Reopen')").count() == 1
    assert page.complaints == []


def test_pages_keep_what_they_have_while_redis_is_away(page, served):
    opened(page, f"/runs/{RUN}", "figure svg text.tick")
    served.source.words = "Redis does not answer for 12 s"
    page.wait_for_selector("#banner:has-text('Redis does not answer')")
    assert page.is_visible("figure svg text.tick")
    opened(page, "/", "text=ended-1")
    page.wait_for_selector("#banner:has-text('the page shows what was read before')")
    served.source.words = ""
    page.wait_for_selector("#banner", state="hidden")


def test_a_server_that_is_gone_leaves_the_page(browser, run_writer, tmp_path):
    server = ServedInThread(run_writer.store, tmp_path / "other")
    served = server.__enter__()
    context = browser.new_context()
    found = context.new_page()
    found.goto(f"{served.url}/")
    found.wait_for_selector("table.runs")
    server.__exit__(None, None, None)
    found.wait_for_selector("#banner:not([hidden])", timeout=WAIT_MS)
    assert "does not answer" in found.inner_text("#banner")
    assert RUN in found.inner_text("table.runs")
    context.close()


def test_pausing_a_run_takes_a_click(page, served):
    opened(page, "/", "table.runs")
    page.click("tr:has-text('letters-1') button:has-text('Pause')")
    page.wait_for_timeout(500)
    assert [(name, action) for name, action, _ in served.source.done] == [(RUN, "pause")]


def test_who_may_only_read_sees_no_buttons(browser, run_writer, tmp_path):
    token, access = demanding(tmp_path, may_write=False)
    with ServedInThread(run_writer.store, tmp_path / "guests", access=access) as served:
        found = logged_in(browser.new_context(), served, token)
        assert found.inner_text("#read-only") == "read only"
        found.goto(f"{served.url}/runs/{RUN}")
        found.wait_for_selector("figure svg", timeout=WAIT_MS)
        assert found.locator("button:has-text('Pause'), button:has-text('Cancel')").count() == 0
        found.context.close()


def test_keys_and_themes(page):
    opened(page, f"/runs/{RUN}/samples/2-1", ".token")
    page.keyboard.press("j")
    page.wait_for_url("**/samples/2-2")
    page.wait_for_selector("h1:has-text('Sample 2-2')")
    page.keyboard.press("k")
    page.wait_for_url("**/samples/2-1")
    page.keyboard.press("t")
    page.wait_for_url("**/timeline")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


@pytest.mark.parametrize("path", PAGES)
def test_a_narrow_screen_does_not_scroll_sideways(page, path):
    page.set_viewport_size({"width": 380, "height": 800})
    opened(page, path, PAGES[path])
    assert page.evaluate("document.documentElement.scrollWidth") <= 381


def test_without_a_session_there_is_the_door(browser, run_writer, tmp_path):
    token, access = demanding(tmp_path)
    with ServedInThread(run_writer.store, tmp_path / "third", access=access) as served:
        context = browser.new_context()
        found = context.new_page()
        found.goto(served.url)
        found.fill("#token", "x" * 40)
        found.click("button")
        found.wait_for_selector("text=not accepted")
        found = logged_in(context, served, token)
        assert found.is_hidden("#read-only")
        assert found.evaluate("document.cookie") == ""
        context.close()
