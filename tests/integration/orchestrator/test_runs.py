"""The orchestrator over real Redis, a real store and real gRPC, with fake workers."""

import asyncio
import json
from collections import Counter

import pytest

from millrace.config.sections.trainer import PackConfig
from millrace.errors import (
    AlreadyExistsError,
    InvalidSpecError,
    InvalidStateError,
    NotFoundError,
    UnavailableError,
)
from millrace.internal.v1 import batch_pb2, rollout_pb2
from millrace.orchestrator.drive import housekeeping
from millrace.rollouts.batch_wire import decode_header
from millrace.rollouts.types import RolloutStatus
from millrace.rpc.channel import call
from millrace.runlog import Names
from millrace.runlog.records.revisions import list_headers
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.records.sealed import Seal
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import CONFIG, bodies, config_json, create, watch
from millrace_testing.patience import patient
from millrace_testing.polling import until

TRAIN = rollout_pb2.PURPOSE_TRAIN


async def test_a_run_goes_from_queued_to_succeeded(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    run = await create(stack, run_id="first")
    events = await watch(stack, run)
    states = [run_pb2.RunState.Name(change.new_state)[10:] for change in bodies(events, "state_changed")]
    assert states == ["STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    assert [(e.step, e.num_rollouts, e.num_failed) for e in bodies(events, "eval_completed")] == [(0, 6, 0), (3, 6, 0)]

    train = [header for header in trainer.headers if header.kind == batch_pb2.BATCH_KIND_TRAIN]
    assert [header.step for header in train] == [0, 1, 2]
    trained = [r.ordinal for h in train for r in h.resolutions if r.outcome == batch_pb2.ORDINAL_OUTCOME_TRAINED]
    assert len(trained) == len(set(trained)) == 6
    assert all(len(header.samples) == 8 for header in train)
    close = trainer.headers[-1]
    assert (close.kind, close.outcome, close.step) == (
        batch_pb2.BATCH_KIND_CLOSE,
        batch_pb2.RUN_OUTCOME_SUCCEEDED,
        3,
    )
    assert close.resolved_below == 6 + len(close.resolutions)
    assert len(close.samples) == 6, "the final evaluation's rollouts go to the trainer for scoring"
    assert env.requests[0].purpose == rollout_pb2.PURPOSE_EVAL


async def test_the_record_of_a_run_has_the_costs_that_rows_are_made_by(stack) -> None:
    """Also where nobody wrote them down: a later release with other defaults plans this run's rows as they were."""
    request = run_service_pb2.CreateRunRequest(kind=run_pb2.RUN_KIND_RL, config_json=json.dumps(CONFIG))
    run = (await call(stack.runs.CreateRun, request)).run
    record = stack.deps["store"].get(Names(stack.prefix, run.uid).run_json, max_bytes=1 << 20)
    pack = json.loads(RunRecord.parse(record, where="the store").config_json)["trainer"]["pack"]
    assert pack == PackConfig().model_dump(mode="json") and pack.keys() >= {"causal_cost", "masked_cost"}


async def test_the_temperature_follows_the_step_that_a_rollout_is_planned_for(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    schedule = {"start_temperature": 1.0, "end_temperature": 0.5, "total_steps": 3}
    run = await create(stack, sampling={"temp_scheduler": schedule})
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    asked = [(each.planned_step, each.sampling.temperature) for each in env.requests if each.purpose == TRAIN]
    assert {step for step, _ in asked} >= {0, 1, 2} and all(t == [1.0, 0.75, 0.5][min(step, 2)] for step, t in asked)
    trained = {sample.temperature for header in trainer.headers[:-1] for sample in header.samples}
    assert trained == {1.0, 0.75, 0.5}, "the trainer divides by each rollout's own"


async def test_environments_have_temperatures_and_groups_of_their_own(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    envs = [
        {"id": "reverse-text", "name": "cool", "sampling": {"temperature": 0.5, "max_tokens": 7}},
        {"id": "reverse-text", "name": "wide", "rollouts_per_example": 4, "args": {"n": 1}},
    ]
    run = await create(stack, env=envs, batch_size=6, rollouts_per_example=2, sampling={"temperature": 1.5})
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    asked = {
        (each.env.name, each.group_size, each.sampling.temperature, each.sampling.max_tokens == 7)
        for each in env.requests
        if each.purpose == TRAIN
    }
    assert asked == {("cool", 2, 0.5, True), ("wide", 4, 1.5, False)}
    for header in trainer.headers[:-1]:
        pairs = {(header.envs[sample.env], sample.temperature) for sample in header.samples}
        assert pairs <= {("cool", 0.5), ("wide", 1.5)}
        assert 6 <= header.num_rollouts < 6 + 4
        trained = Counter(each.env for each in header.resolutions if each.outcome == batch_pb2.ORDINAL_OUTCOME_TRAINED)
        assert 2 * trained["cool"] + 4 * trained["wide"] <= header.num_rollouts


async def test_an_ended_run_is_sealed_also_where_that_failed_at_its_end(stack, monkeypatch) -> None:
    await asyncio.gather(stack.env_server(), stack.inference(), stack.trainer())
    store, refused = stack.deps["store"], []

    def refuse(*args: object, **fields: object) -> bool:
        refused.append(args)
        raise UnavailableError("the store is away", reason="STORE_UNREACHABLE")

    monkeypatch.setattr(housekeeping, "write_seal", refuse)
    run = await create(stack)
    await watch(stack, run)
    names = Names(stack.prefix, run.uid)
    async with asyncio.timeout(20):
        while (found := await asyncio.to_thread(store.head, names.seal(0))) is None:
            await asyncio.sleep(0.05)
    seal = Seal.decode(store.get(found.key), where=found.key)
    assert refused and seal.state == "SUCCEEDED" and seal.by.endswith("later")
    named = {ref.key for header in headers(store, names) for ref in header.objects}
    archives = {info.key.removeprefix(names.root) for info in store.list(names.event_archive)}
    assert {"run.json", *archives} <= {*seal.objects} | named


def headers(store, names: Names) -> list[batch_pb2.BatchHeader]:
    return [decode_header(store.get(names.batch_header(*at))) for at in list_headers(store, names)]


async def test_async_level_0_trains_only_on_the_newest_policy(stack) -> None:
    await stack.env_server(delay_s=0.05)
    await stack.inference()
    trainer = await stack.trainer()
    await watch(stack, await create(stack, async_level=0))
    for header in trainer.headers[:-1]:
        assert {sample.min_policy_version for sample in header.samples} == {header.step}


async def test_failed_members_are_played_again_and_hopeless_ordinals_are_dropped(stack) -> None:
    broken = {(0, 1, 0): RolloutStatus.ENV_ERROR, (1, 0, 0): RolloutStatus.QUARANTINED} | {
        (2, 2, attempt): RolloutStatus.TIMEOUT for attempt in range(5)
    }
    env, _, trainer = await stack.env_server(broken=broken), await stack.inference(), await stack.trainer()
    await watch(stack, await create(stack))
    resolved = {r.ordinal: (r.outcome, r.reason, r.attempts) for h in trainer.headers for r in h.resolutions}
    assert resolved[0] == (batch_pb2.ORDINAL_OUTCOME_TRAINED, "", 2)
    assert resolved[1] == (batch_pb2.ORDINAL_OUTCOME_DROPPED, "quarantined", 1)
    assert resolved[2] == (batch_pb2.ORDINAL_OUTCOME_DROPPED, "error", 2)
    again = [r for r in env.requests if r.ordinal == 0 and r.attempt == 1 and r.purpose == rollout_pb2.PURPOSE_TRAIN]
    assert [list(request.members) for request in again] == [[1]], "only the failed member is played again"


async def test_a_new_orchestrator_continues_from_the_log(stack) -> None:
    await stack.env_server(delay_s=0.2)
    await stack.inference()
    trainer = await stack.trainer()
    trainer.hold.clear()  # the run cannot end before we let it
    run = await create(stack)
    await until(lambda: trainer.headers, timeout_s=20)
    port = int(stack.address.rpartition(":")[2])
    await stack.kill_orchestrator()
    await stack.start_orchestrator(port)
    trainer.hold.set()
    events = await watch(stack, run)
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_SUCCEEDED
    assert [header.step for header in trainer.headers] == [0, 1, 2, 3]
    assert len({header.writer_epoch for header in trainer.headers}) == 2
    ordinals = [r.ordinal for header in trainer.headers for r in header.resolutions]
    assert len(ordinals) == len(set(ordinals))


async def test_a_cancelled_run_closes_its_log(stack) -> None:
    env, _, trainer = await stack.env_server(silent=set(range(1000))), await stack.inference(), await stack.trainer()
    run = await create(stack)
    watching = asyncio.create_task(watch(stack, run))
    await until(lambda: any(request.purpose == rollout_pb2.PURPOSE_TRAIN for request in env.requests), timeout_s=20)
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name, reason="test"))
    events = await watching
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_CANCELLED
    assert trainer.headers[-1].outcome == batch_pb2.RUN_OUTCOME_CANCELLED
    assert {r.reason for r in trainer.headers[-1].resolutions} == {"cancelled"}
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name))  # twice is fine


async def test_an_environment_that_does_not_load_fails_the_run_and_says_why(stack) -> None:
    await stack.env_server(fail_open="num_train must be positive, got -1")
    await stack.inference()
    await stack.trainer()
    events = await watch(stack, await create(stack))
    last = bodies(events, "state_changed")[-1]
    assert last.new_state == run_pb2.RUN_STATE_FAILED
    assert last.error.reason == "ENV_LOAD_FAILED" and last.error.component == "env-server"
    assert "'reverse-text'" in last.error.message and "num_train must be positive" in last.error.message


async def test_a_trainer_that_gives_up_fails_the_run(stack) -> None:
    await stack.env_server()
    await stack.inference()
    trainer = await stack.trainer()
    trainer.error = ("MODEL_NOT_FOUND", "model 'm' does not exist; make it with `millrace sft`")
    run = await create(stack)
    last = bodies(await watch(stack, run), "state_changed")[-1]
    assert last.new_state == run_pb2.RUN_STATE_FAILED
    assert (last.error.reason, last.error.component) == ("MODEL_NOT_FOUND", "trainer")
    shown = (await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name=run.uid))).run
    assert shown.state == run_pb2.RUN_STATE_FAILED and "millrace sft" in shown.error.message


async def test_without_workers_a_run_is_queued_and_says_why(stack) -> None:
    run = await create(stack)
    answer = await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.name))
    assert "no trainer worker is free" in answer.summary
    shown = (await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name=run.name))).run
    assert shown.state == run_pb2.RUN_STATE_QUEUED


async def test_a_stuck_environment_is_named(stack) -> None:
    await stack.env_server(silent=set(range(1000)))
    await stack.inference()
    await stack.trainer()
    run = await create(stack)
    async with asyncio.timeout(20):
        while True:
            answer = await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.name))
            waits = {wait.reason: wait for wait in answer.waits if wait.owner.startswith("orchestrator")}
            # Its age goes on counting: the loop looks up every second, the wait does not begin anew.
            if "2 of 2 groups for batch 0" in waits and waits["2 of 2 groups for batch 0"].age_seconds > 1.5:
                break
            await asyncio.sleep(0.1)
    assert waits["2 of 2 groups for batch 0"].waits_on == "env-server"
    assert "orchestrator" in answer.summary


async def test_create_is_idempotent_by_request_id(stack) -> None:
    first = await create(stack, request_id="11111111-0000-4000-8000-000000000000")
    again = await create(stack, request_id="11111111-0000-4000-8000-000000000000")
    assert (again.uid, again.name) == (first.uid, first.name)
    with pytest.raises(AlreadyExistsError, match=r"was used for run .* with another config"):
        await create(stack, request_id="11111111-0000-4000-8000-000000000000", batch_size=16)
    listed = await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest())
    assert [run.uid for run in listed.runs] == [first.uid]


async def test_a_taken_name_is_refused(stack) -> None:
    await create(stack, run_id="same")
    with pytest.raises(AlreadyExistsError, match="same"):
        await create(stack, run_id="same")


async def test_every_violation_is_reported_at_once(stack) -> None:
    document = json.loads(config_json())
    document["orchestrator"]["batch_size"] = 10
    document["trainer"]["optim"]["learning_rate"] = 1
    request = run_service_pb2.CreateRunRequest(
        kind=run_pb2.RUN_KIND_SFT, config_json=json.dumps(document), run_id="Bad_Id"
    )
    with pytest.raises(InvalidSpecError) as raised:
        await call(stack.runs.CreateRun, request)
    fields = {violation.field for violation in raised.value.violations}
    assert {"run_id", "kind", "orchestrator.batch_size", "trainer.optim.learning_rate"} <= fields


async def test_validate_only_creates_nothing(stack) -> None:
    request = run_service_pb2.CreateRunRequest(
        kind=run_pb2.RUN_KIND_RL, config_json=config_json(), run_id="dry", validate_only=True
    )
    assert (await call(stack.runs.CreateRun, request)).run.name == "runs/dry"
    with pytest.raises(NotFoundError, match="run 'dry' does not exist"):
        await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name="runs/dry"))


async def test_pages_and_bad_tokens(stack) -> None:
    names = [(await create(stack, run_id=f"run-{i}")).name for i in range(3)]
    first = await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest(page_size=2))
    assert [run.name for run in first.runs] == [names[2], names[1]]
    rest = await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest(page_token=first.next_page_token))
    assert [run.name for run in rest.runs] == [names[0]] and not rest.next_page_token
    with pytest.raises(InvalidSpecError, match="page_token"):
        await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest(page_token="!!"))


@pytest.mark.long
async def test_large_configs_do_not_keep_the_others_waiting(stack):
    """Eight at once, each as large as any may be; checked beside the event loop, two at a time."""
    known = await create(stack, run_id="known")
    args = {f"name-{number}": [number, "text"] * 8 for number in range(3_500)}  # evaluations have them, too
    text = config_json(env=[{"id": "reverse-text", "args": args}])
    assert 1 << 19 < len(text) <= 1 << 20

    async def submit(number: int) -> str:
        request = run_service_pb2.CreateRunRequest(
            kind=run_pb2.RUN_KIND_RL, config_json=text, run_id=f"large-{number}", validate_only=True
        )
        return (await call(stack.runs.CreateRun, request, timeout_s=patient(60.0))).run.name

    submitted = asyncio.gather(*(submit(number) for number in range(8)))
    num_answers = 0
    while not submitted.done():
        listed = await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest(), timeout_s=patient(5.0))
        assert [run.uid for run in listed.runs] == [known.uid]
        num_answers += 1
    assert await submitted == [f"runs/large-{number}" for number in range(8)]
    assert num_answers > 2, "while they were checked"


async def test_environments_are_loaded_at_submission_on_request(stack) -> None:
    """Before anything is created, and with the environment's own error."""

    def request(*, validate_only: bool) -> run_service_pb2.CreateRunRequest:
        return run_service_pb2.CreateRunRequest(
            kind=run_pb2.RUN_KIND_RL, config_json=config_json(), validate_only=validate_only, check_environments=True
        )

    with pytest.raises(UnavailableError, match="no env-server is registered"):
        await call(stack.runs.CreateRun, request(validate_only=True))
    env = await stack.env_server()
    assert (await call(stack.runs.CreateRun, request(validate_only=True))).run.name
    env.fail_open = "no such column 'answer' (at rows.py:3 in load)"
    with pytest.raises(InvalidStateError, match="no such column 'answer'") as caught:
        await call(stack.runs.CreateRun, request(validate_only=False))
    assert caught.value.reason == "ENV_LOAD_FAILED" and "fix that, then submit" in (caught.value.remedy or "")
    env.fail_type = "ENV_DATA_MISSING"
    with pytest.raises(InvalidStateError, match="ENV_DATA_MISSING: no such column 'answer'") as caught:
        await call(stack.runs.CreateRun, request(validate_only=False))
    assert caught.value.reason == "ENV_DATA_MISSING", "the worker's own reason is the run's"
    assert not (await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest())).runs
