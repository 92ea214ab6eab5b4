"""What the dashboard answers about a run, from a store and a reader process of its own."""

import json
import threading
from urllib.parse import quote

import pytest

from millrace.storage.local import LocalStore
from millrace_testing.dashboard import HOSTILE, RUN, SECRET, RunWriter, Served, ServedInThread

STEPS = 4
SAMPLES = f"/api/runs/{RUN}/samples"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    """Yield a dashboard in a thread of its own, over a run with hostile completions."""
    place = tmp_path_factory.mktemp("dashboard")
    store = LocalStore(place / "store")
    writer = RunWriter(store=store, members=len(HOSTILE) + 1)
    for step in range(STEPS):
        writer.step(step, HOSTILE)
    with ServedInThread(store, place / "index") as found:
        complete(found, STEPS)
        yield found


def complete(served: Served, batches: int) -> dict:
    """Return the first page of samples, once every batch is in the index."""
    for _ in range(600):
        status, page = served.json(SAMPLES)
        assert status == 200, page
        if page["index"]["batches"] >= batches:
            return page
        threading.Event().wait(0.1)
    raise AssertionError(page["index"])


def test_a_page_of_samples_says_what_came_of_each(served):
    status, page = served.json(f"{SAMPLES}?sort=step&size=200")
    assert status == 200
    assert page["total"] == STEPS * (len(HOSTILE) + 1)
    first, last = page["samples"][0], page["samples"][len(HOSTILE)]
    assert (first["id"], first["is_trained"], first["advantage"], first["reward"]) == ("0-0", True, -1.0, 0.0)
    assert (last["status"], last["is_trained"], last["advantage"]) == ("env_error", False, None)
    assert page["names"]["env"] == ["letters"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("step=2&size=200", {f"2-{at}" for at in range(len(HOSTILE) + 1)}),
        ("outcome=failed", {f"{step}-{len(HOSTILE)}" for step in range(STEPS)}),
        ("min_reward=3.5", {f"{step}-7" for step in range(STEPS)}),
        ("reward=0.5&step=1", {"1-1"}),
        ("version=2", {f"3-{at}" for at in range(len(HOSTILE))}),
        ("status=ok&max_advantage=-1&min_step=2", {"2-0", "3-0"}),
        ("text=ANSWER", {f"{step}-{at}" for step in range(STEPS) for at in range(len(HOSTILE) + 1)}),
        ("text=toolerror%3A+%3Cscript", {f"{step}-{len(HOSTILE)}" for step in range(STEPS)}),
        ("text=JavaScript:window&max_step=1", {"0-3", "1-3"}),
        ("text=task+2&outcome=trained", {f"2-{at}" for at in range(len(HOSTILE))}),
        ("text=ta%C3%A4sk", set()),
        ("env=nobody", set()),
        ("outcome=dropped", set()),
    ],
)
def test_filters(served, query, expected):
    status, page = served.json(f"{SAMPLES}?{query}")
    assert status == 200, page
    assert {each["id"] for each in page["samples"]} == expected
    assert page["total"] == len(expected)


def test_pages_do_not_overlap_and_miss_nothing(served):
    for sort in ("reward", "-reward", "step", "-step", "-advantage", "-tokens"):
        seen = []
        for offset in range(0, 40, 7):
            _, page = served.json(f"{SAMPLES}?sort={sort}&size=7&offset={offset}")
            seen += page["samples"]
        assert len(seen) == len({each["id"] for each in seen}) == STEPS * (len(HOSTILE) + 1)
        name = sort.removeprefix("-")
        values = [each[name] for each in seen if each[name] is not None]
        assert values == sorted(values, reverse=sort.startswith("-"))
        assert all(each[name] is None for each in seen[len(values) :])


def test_a_sample_has_its_conversation_its_group_and_its_tokens(served):
    status, found = served.json(f"{SAMPLES}/2-1")
    assert status == 200
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"]
    assert found["messages"][1]["content"] == HOSTILE[1]
    assert [each["id"] for each in found["group"]] == [f"2-{at}" for at in range(len(HOSTILE) + 1)]
    assert found["metrics"] == {"share": 0.5}
    status, tokens = served.json(f"{SAMPLES}/2-2/tokens?offset=1&size=3")
    assert (tokens["total"], tokens["ids"], tokens["mask"]) == (6, [1, 2, 3], [0, 1, 1])
    assert (tokens["logprobs"], tokens["versions"]) == ([0.0, -0.5, -0.5], [-1, 1, 1])
    assert tokens["advantages"] == [0.0, 1.0, 1.0]
    status, missing = served.json(f"{SAMPLES}/9-9")
    assert status == 404 and missing["error"]["reason"] == "SAMPLE_NOT_FOUND"
    assert served.json(f"{SAMPLES}/{quote('../x', safe='')}")[0] in (400, 404)


def test_what_a_model_wrote_arrives_as_text_and_without_secrets(served):
    _, page = served.json(f"{SAMPLES}?step=0&sort=step&size=200")
    for at, said in enumerate(HOSTILE):
        status, headers, body = served.ask(f"{SAMPLES}/0-{at}")
        assert status == 200 and body.isascii()
        assert headers["content-type"] == "application/json"
        content = json.loads(body)["messages"][1]["content"]
        assert content == said or "***" in content
    texts = json.dumps(page) + json.dumps([served.json(f"{SAMPLES}/0-{at}")[1] for at in range(len(HOSTILE))])
    assert SECRET not in texts and "hunter2hunter2" not in texts
    assert "***" in texts


def test_secrets_of_a_config_are_masked(served):
    _, run = served.json(f"/api/runs/{RUN}")
    values = {each["key"]: each["value"] for each in run["config"]}
    assert values["orchestrator.client.api_key"] == "***"
    assert values["orchestrator.env[0].args"] == {"api_key": "***"}
    assert values["model.name"] == "m"


def test_curves_and_their_spread(served):
    _, found = served.json(f"/api/runs/{RUN}/metrics?names=reward/mean,loss/mean&spread=1")
    assert found["curves"]["reward/mean"] == [[step, 0.25 * step] for step in range(STEPS)]
    assert "time/step" in found["names"] and "time/step" not in found["curves"]
    step, mean, low, high = found["spread"]["reward/letters"][1]
    assert (step, mean, low, high) == (1, 1.75, 0.0, 3.0)
    assert found["spread"]["staleness"][3] == [3, 1.0, 1.0, 1.0]
    _, few = served.json(f"/api/runs/{RUN}/metrics?names=reward/mean&points=2")
    assert [point[0] for point in few["curves"]["reward/mean"]] == [0, 2, 3]


def test_curves_of_some_steps_and_what_their_x_can_be(served):
    path = f"/api/runs/{RUN}/metrics?axes=1&names=reward/mean"
    _, found = served.json(f"{path}&first=1&last=2")
    assert found["curves"]["reward/mean"] == [[1, 0.25], [2, 0.5]]
    assert [row[0] for row in found["axes"]] == [0, 1, 2], "an evaluation of version 1 stands where step 0 has ended"
    assert [row[2] for row in found["axes"]] == [12.0, 24.0, 36.0]
    assert [late[1] - early[1] for early, late in zip(found["axes"], found["axes"][1:], strict=False)] == [3.0, 3.0]
    _, spread = served.json(f"{path}&spread=1&first=3")
    assert [point[0] for point in spread["spread"]["reward/letters"]] == [3]
    assert "axes" not in served.json(f"/api/runs/{RUN}/metrics?names=reward/mean")[1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("loss/*", {"loss/mean"}), ("*/mean", {"batch/off_policy_level/mean", "loss/mean", "reward/mean"}),
        ("loss/mean*mean", set()), ("l*s*/m*n", {"loss/mean"}), ("l*o*o*n", set()),
        ("loss/*,loss/mean,nothing/*", {"loss/mean"}), ("*loss*", {"loss/mean"}),
    ],
)  # fmt: skip
def test_a_star_in_the_name_of_a_metric_stands_for_any_text(served, names, expected):
    _, found = served.json(f"/api/runs/{RUN}/metrics?names={names}")
    assert set(found["curves"]) == expected


def test_events_come_newest_first_and_in_pages(served):
    _, page = served.json(f"/api/runs/{RUN}/events?kinds=step_completed&size=3")
    assert [event["body"].get("step", 0) for event in page["events"]] == [3, 2, 1] and page["has_more"]
    _, rest = served.json(f"/api/runs/{RUN}/events?kinds=step_completed&size=3&before={page['events'][-1]['cursor']}")
    assert [event["body"].get("step", 0) for event in rest["events"]] == [0] and not rest["has_more"]


def test_lineage_in_both_directions(served):
    _, found = served.json(f"/api/runs/{RUN}/lineage?sample=3-1")
    assert [each["version"] for each in found["made_by"]] == [2]
    assert found["step"]["step"] == 3 and found["step"]["trained"] == len(HOSTILE)
    assert found["became"]["version"] == 4 and found["became"]["served"][0]["replica"] == "inference-1"
    _, failed = served.json(f"/api/runs/{RUN}/lineage?sample=3-{len(HOSTILE)}")
    assert failed["made_by"] == [] and failed["became"] is None and not failed["is_trained"]
    _, version = served.json(f"/api/runs/{RUN}/lineage?version=2")
    assert version["made_from"]["step"] == 1 and version["made_from"]["num_samples"] == len(HOSTILE)
    assert version["made"]["num_samples"] == len(HOSTILE) and version["made"]["steps"] == [3]
    assert version["next"]["version"] == 3
    assert served.json(f"/api/runs/{RUN}/lineage?version=77")[0] == 404
    assert served.json(f"/api/runs/{RUN}/lineage?version=1&sample=1-1")[0] == 400
    assert served.json(f"/api/runs/{RUN}/lineage")[0] == 400


@pytest.mark.parametrize(
    "path",
    [
        f"{SAMPLES}?sort=drop", f"{SAMPLES}?size=9999", f"{SAMPLES}?offset=-1", f"{SAMPLES}?min_reward=nan",
        f"{SAMPLES}?reward=1e999999", f"{SAMPLES}?version=1.5", f"{SAMPLES}?who=me", f"{SAMPLES}?step=0&step=1",
        f"{SAMPLES}?outcome=%3Cscript%3E", f"{SAMPLES}?offset={'9' * 400}", f"/api/runs/{RUN}/events?size=x",
        f"/api/runs/{RUN}/metrics?points=-5", f"/api/runs/{RUN}/timeline?steps=abc", f"{SAMPLES}?{'a' * 9000}=1",
        f"{SAMPLES}?text={'a' * 201}",
        f"/api/runs/{RUN}/metrics?first=x",
        f"{SAMPLES}/0-0/tokens?part=-1", f"{SAMPLES}/not-an-id",
        f"{SAMPLES}?{'&'.join(f'a{at}=1' for at in range(65))}",
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named(served, path):
    status, found = served.json(path)
    assert status == 400, found
    assert found["error"]["reason"] and found["error"]["message"]


def test_what_is_not_there(served):
    for path in ("/api/runs/nobody", "/api/runs/nobody/samples", f"/api/runs/{RUN}/secrets", "/static/../app.py", "/x"):
        status, found = served.json(path)
        assert (status, set(found["error"])) == (404, {"reason", "message", "remedy"})
    assert served.json("/api/runs", method="DELETE")[0] == 404


def test_any_parameter_gets_an_answer_of_ours(served):
    """Deterministic noise in every parameter: never a 500, always JSON."""
    noise = ["", "-1", "1e9", "NaN", "\x00", "é%", "a" * 300, "../..", "٣"]
    names = ["sort", "size", "offset", "min_reward", "version", "outcome", "env", "sample"]
    for name in names:
        for value in noise:
            for path in (SAMPLES, f"/api/runs/{RUN}/lineage"):
                status, found = served.json(f"{path}?{name}={quote(value)}")
                assert status in (200, 400, 404), (path, name, value, found)


def test_static_files_are_of_the_package_alone_and_cached(served):
    status, headers, body = served.ask("/static/app.js")
    assert status == 200 and headers["content-type"].startswith("text/javascript")
    assert served.ask("/static/app.js", If_None_Match=headers["etag"])[0] == 304
    assert b"http://" not in body.replace(b"http://www.w3.org", b"")
    for name in ("/static/%2e%2e/plain.py", "/static/..%2fplain.py", "/static/nothing.js"):
        assert served.ask(name)[0] == 404


def test_the_reader_dies_and_the_next_question_is_answered(tmp_path):
    import psutil

    store = LocalStore(tmp_path / "store")
    RunWriter(store=store).step(0)
    with ServedInThread(store, tmp_path / "index") as served:
        before = complete(served, 1)
        readers = [
            child for child in psutil.Process().children() if "millrace.readers.dashboard.reader" in child.cmdline()
        ]
        for reader in readers:
            if str(tmp_path) in " ".join(file.path for file in reader.open_files()):
                reader.kill()
                reader.wait(30)
        statuses = [served.json(SAMPLES)[0] for _ in range(3)]
        assert statuses[-1] == 200 and set(statuses) <= {200, 503}
        assert complete(served, 1)["samples"] == before["samples"]
