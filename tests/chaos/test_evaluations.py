"""What a run reports of an evaluation of "policy N" is what `millrace eval --run RUN --steps N` finds, played alone.

Engines, Redis and the S3 server are real; sampling is greedy, so equal is equal to the last digit.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.client import Client
from millrace.storage.s3 import S3Store
from millrace.v1 import event_pb2, run_service_pb2
from millrace_testing.chaos.replica import extra_replica
from millrace_testing.chaos.run import WAITS_S, ChaosRun
from millrace_testing.chaos.stack import ChaosStack

pytestmark = pytest.mark.long

BUCKET = "millrace-evaluations"
TASKS, PER_TASK = 64, 8
ENVS = json.dumps([{"id": "reverse-text", "args": {"num_train": 2000, "num_eval": TASKS}}])
GREEDY = {"sampling.temperature": 0, "sampling.max-tokens": 12, "rollouts-per-example": PER_TASK, "num-examples": TASKS}


@pytest.fixture(scope="module")
def store_url(s3_endpoint: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("AWS_ACCESS_KEY_ID", "test")
        environ.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
        S3Store(bucket=BUCKET, endpoint=s3_endpoint, region="us-east-1").ensure_bucket()
        yield f"s3://{BUCKET}/store?endpoint={s3_endpoint}&region=us-east-1"


@pytest.fixture(scope="module")
def stack(warm, store_url: str) -> Iterator[ChaosStack]:
    with ChaosStack(warm, "evaluations", env={"MILLRACE_STORE_URL": store_url}) as running:
        running.wait_ready()
        yield running


def submitted(stack: ChaosStack, *, pin: str) -> ChaosRun:
    """Return a run that is evaluated every second version."""
    keys = {f"orchestrator.eval.{name}": value for name, value in GREEDY.items()}
    keys |= {"orchestrator.eval.interval": 2, "orchestrator.eval.skip-first-step": "true", "orchestrator.eval.pin": pin}
    return stack.submit(f"pin-{pin}", "--orchestrator.env", ENVS, max_steps=6, **keys)


def wait_amid_an_evaluation(run: ChaosRun) -> str:
    """Return what `millrace run why` says of it, once an eighth of it is played."""

    async def ask(client: Client) -> run_service_pb2.ExplainRunResponse:
        return await client.runs.explain(run.name)

    ends = time.monotonic() + WAITS_S
    while time.monotonic() < ends and not run.is_over:
        for wait in run.ask(ask).waits:
            missing, _, what = wait.reason.partition(" rollouts of the evaluation of ")
            if what and int(missing) < TASKS * PER_TASK * 7 // 8:
                return wait.reason
        time.sleep(0.02)
    raise AssertionError(f"no evaluation was seen. {run.describe()}")


def reports(run: ChaosRun) -> list[event_pb2.EvalCompleted]:
    return [event.eval_completed for event in run.of("eval_completed")]


def played_alone(stack: ChaosStack, run: ChaosRun, step: int, store_url: str) -> dict[str, Any]:
    """Return what `millrace eval` finds of one of the run's policies."""
    name, flags = f"alone-{run.name.removeprefix('runs/')}", [f"--{key}={value}" for key, value in GREEDY.items()]
    stack.workplace.millrace(
        *("eval", "--run", run.name.removeprefix("runs/"), "--steps", str(step), "--no-eval-base"),
        *("--store", store_url, "--env", ENVS, "--name", name, *flags),
    )
    found = json.loads((stack.workplace.path / "outputs" / name / "eval.json").read_text())
    (one,) = found["policies"]
    return one["envs"]["reverse-text"]


def versions_by_evaluation(stack: ChaosStack, run: ChaosRun, store_url: str) -> dict[int, set[tuple[int, int]]]:
    """Return oldest and newest version of the rollouts that `millrace run samples` shows of each evaluation, by its
    step.
    """
    said = stack.workplace.millrace(
        *("run", "samples", run.uid, "--store", store_url, "--purpose", "eval", "-o", "json", "--limit", "100000")
    )
    found: dict[int, list[tuple[int, int]]] = {}
    for line in said.splitlines():
        each = json.loads(line)
        step = int(each["eval_id"].partition("@")[2].partition("-")[0])
        found.setdefault(step, []).append((each["versions"][0], each["versions"][1]))
    return {step: set(each) for step, each in found.items()}


@pytest.mark.timeout(600)
def test_a_held_evaluation_is_the_one_that_is_played_alone(stack: ChaosStack, store_url: str) -> None:
    """One of two replicas is held, and the orchestrator killed amid its evaluation."""
    with extra_replica(stack, "second") as second:
        second.wait_ready()
        run = submitted(stack, pin="hold")
        print(wait_amid_an_evaluation(run))
        stack.kill("orchestrator")
        stack.finish(run)
    found = reports(run)
    assert all((each.num_rollouts, each.num_failed) == (TASKS * PER_TASK, 0) for each in found)
    assert all(each.step == each.policy_version == each.policy_version_max for each in found)
    named = {each.step for each in found} | {step for each in found for step in each.skipped}
    assert named == {2, 4, 6}, "what is not evaluated is named"
    assert found[0].eval_id.endswith("-e2"), "the successor has played it"
    print([(event.policy_served.replica, event.policy_served.version) for event in run.of("policy_served")])
    report, last = found[0], found[-1]
    alone = played_alone(stack, run, report.step, store_url)
    assert alone["reward_mean"] == pytest.approx(report.reward_mean, abs=1e-12)
    assert alone["pass@1"] == pytest.approx(report.metrics["pass@1"], abs=1e-12)
    assert alone["reward_mean"] != pytest.approx(last.reward_mean, abs=1e-4), "any version has this reward"


@pytest.mark.timeout(300)
def test_an_evaluation_that_spans_versions_names_those_of_its_rollouts(stack: ChaosStack, store_url: str) -> None:
    run = submitted(stack, pin="span")
    stack.finish(run)
    found = reports(run)
    assert found[0].policy_version < found[0].policy_version_max, "replicas were updated amid it"
    played = versions_by_evaluation(stack, run, store_url)
    for each in found:
        oldest, newest = zip(*played[each.step], strict=True)
        assert (min(oldest), max(newest)) == (each.policy_version, each.policy_version_max)
    assert {each.step for each in found} | {step for each in found for step in each.skipped} == {2, 4, 6}
