"""A run whose config names a function of the user's own: refused unless the operator allows it, then in its log."""

import asyncio
import importlib
import os
import sys
from pathlib import Path

import pytest

from millrace.config.load import validate_document
from millrace.errors import InvalidSpecError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import unpack_batch
from millrace.rpc.channel import call
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import CONFIG, bodies, create, get, log_of, restart_orchestrator, watch
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers

MODULE = """
import threading
calls = []
def by_reward(rewards, lengths, factor=1.0):
    return factor * rewards + 0.125
def raises_later(rewards, lengths):
    calls.append(1)
    if len(calls) > 2:
        raise ValueError("third call")
    return rewards
waiting = []
def waits(rewards, lengths, run):
    import time
    waiting.append(run)
    if waiting.count(run) > 2:
        time.sleep(20)
    return rewards
def every_third(ordinal, tasks, *, step, seed, first=0):
    [(env, indices)] = tasks.items()
    assert seed == 0 and step >= 0
    return env, indices[(first + 3 * ordinal) % len(indices)]
entered, may_go = threading.Event(), threading.Event()
def slow_once(ordinal, tasks, *, step, seed):
    if ordinal == 9:  # beyond those of the trial
        entered.set()
        assert may_go.wait(60), "the orchestrator stood still"
    return every_third(ordinal, tasks, step=step, seed=seed)
def at_random(ordinal, tasks, **kwargs):
    import random
    return "reverse-text", random.randrange(1 << 30) % len(tasks["reverse-text"])
"""


@pytest.fixture
async def allowing(stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An orchestrator that may load `own_credit`."""
    (tmp_path / "own_credit.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    await stack.kill_orchestrator()
    stack.custom_code = "own_credit"
    await stack.start_orchestrator(int(stack.address.rpartition(":")[2]))
    return stack


def algo(function: str, **kwargs: float) -> dict[str, object]:
    return {"type": "custom", "import_path": f"own_credit:{function}", "kwargs": kwargs}


async def test_who_may_submit_runs_may_not_thereby_run_code(stack) -> None:
    with pytest.raises(InvalidSpecError, match="MILLRACE_CUSTOM_CODE is not set") as raised:
        await create(stack, run_id="refused", algo=algo("by_reward"))
    assert raised.value.violations[0].field == "orchestrator.algo.import_path"


async def test_a_loss_that_no_trainer_may_load_is_refused_when_it_is_submitted(stack) -> None:
    document = {**CONFIG, "trainer": {"loss": {"type": "custom", "import_path": "own_losses:fn"}}}
    config = validate_document(document).resolved_json()
    request = run_service_pb2.CreateRunRequest(kind=run_pb2.RUN_KIND_RL, config_json=config, validate_only=True)
    await call(stack.runs.CreateRun, request)  # whether the next trainer may is not known yet
    await stack.trainer()
    refused: list[InvalidSpecError] = []

    async def is_refused() -> bool:
        try:
            await call(stack.runs.CreateRun, request)  # the trainer registers in its own time
        except InvalidSpecError as error:
            refused.append(error)
        return bool(refused)

    await until(is_refused)
    [violation] = refused[0].violations
    assert "the trainer may not load the module 'own_losses'" in violation.message
    assert refused[0].reason == "CUSTOM_CODE_NOT_ALLOWED" and violation.field == "trainer.loss.import_path"


async def test_the_log_has_what_the_function_returned(allowing) -> None:
    await allowing.env_server(), await allowing.inference()
    trainer = await allowing.trainer()
    run = await create(allowing, run_id="own", algo=algo("by_reward", factor=2.0))
    events = await watch(allowing, run)
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_SUCCEEDED
    samples = []
    for header in trainer.headers:
        if header.kind == batch_pb2.BATCH_KIND_TRAIN:
            chunks = [allowing.deps["store"].get(chunk.key) for chunk in header.chunks]
            samples += unpack_batch(header, dict(enumerate(chunks)))
    assert len(samples) == 24
    for sample in samples:
        assert set(sample.advantages[sample.loss_mask == 1].tolist()) == {2.0 * sample.reward + 0.125}


async def test_a_function_that_raises_during_the_run_ends_it_with_its_error(allowing) -> None:
    await allowing.env_server(), await allowing.inference(), await allowing.trainer()
    run = await create(allowing, run_id="late", algo=algo("raises_later"))
    last = bodies(await watch(allowing, run), "state_changed")[-1]
    assert last.new_state == run_pb2.RUN_STATE_FAILED
    assert "own_credit:raises_later" in last.reason and "ValueError: third call" in last.reason


SLOW_MODULE = """
import threading
may_go = threading.Event()
times = globals().get("times", 0) + 1
assert may_go.wait(60), "the orchestrator stood still"
def by_reward(rewards, lengths):
    return rewards
"""


async def test_a_module_that_is_slow_to_import_holds_up_nobody_else(allowing, tmp_path: Path) -> None:
    path = tmp_path / "own_slow.py"
    path.write_text(SLOW_MODULE)
    await allowing.kill_orchestrator()
    allowing.custom_code = "own_slow"
    await allowing.start_orchestrator(int(allowing.address.rpartition(":")[2]))

    async def is_imported(times: int) -> None:
        """Wait until the module is being imported for that time, ask the orchestrator, and let the import end."""
        await until(lambda: getattr(sys.modules.get("own_slow"), "times", 0) == times, what=f"import {times}")
        await call(allowing.runs.ListRuns, run_service_pb2.ListRunsRequest())
        sys.modules["own_slow"].may_go.set()

    algorithm = {"type": "custom", "import_path": "own_slow:by_reward"}
    creating = asyncio.create_task(create(allowing, run_id="slow", algo=algorithm))
    await is_imported(1)
    run = await creating
    os.utime(path, ns=(0, 0))  # it is imported again by the run, as after an edit
    await allowing.env_server(), await allowing.inference(), await allowing.trainer()
    await is_imported(2)
    assert bodies(await watch(allowing, run), "state_changed")[-1].new_state == run_pb2.RUN_STATE_SUCCEEDED


def buffer(function: str, **kwargs: int) -> dict[str, object]:
    return {"sampler": f"own_credit:{function}", "sampler_kwargs": kwargs}


async def test_a_sampler_draws_the_same_tasks_after_a_restart(allowing) -> None:
    await allowing.env_server(), await allowing.inference(), await allowing.trainer()
    run = await create(allowing, run_id="sampled", max_steps=6, eval=None, buffer=buffer("every_third", first=1))

    async def has_begun() -> bool:
        return any(header.step >= 2 for header in (await load_headers(await log_of(allowing, run)))[0])

    await until(has_begun)
    await restart_orchestrator(allowing)
    events = await watch(allowing, run)
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_SUCCEEDED
    headers, _ = await load_headers(await log_of(allowing, run))
    drawn = {item.ordinal: item.task_id for header in headers for item in header.resolutions}
    assert len(drawn) >= 12
    assert drawn == {ordinal: f"train/{(1 + 3 * ordinal) % 20}" for ordinal in drawn}


async def test_a_sampler_that_is_slow_holds_up_its_run_and_nobody_else(allowing) -> None:
    await allowing.env_server(), await allowing.inference(), await allowing.trainer()
    run = await create(allowing, run_id="slow", eval=None, max_steps=6, buffer=buffer("slow_once"))
    own_credit = importlib.import_module("own_credit")
    await until(own_credit.entered.is_set, what="the function is called")
    assert (await get(allowing, run)).state == run_pb2.RUN_STATE_RUNNING, "it answers, and takes heartbeats"

    async def is_shown() -> bool:
        answer = await call(allowing.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.name))
        return "the task of ordinal 9" in str(answer)

    await until(is_shown, what="`run why` says so")
    own_credit.may_go.set()
    assert bodies(await watch(allowing, run), "state_changed")[-1].new_state == run_pb2.RUN_STATE_SUCCEEDED


async def test_a_sampler_that_is_no_function_of_its_arguments_ends_the_run_with_the_remedy(allowing) -> None:
    await allowing.env_server(), await allowing.inference(), await allowing.trainer()
    run = await create(allowing, run_id="random", buffer=buffer("at_random"))
    last = bodies(await watch(allowing, run), "state_changed")[-1]
    assert last.new_state == run_pb2.RUN_STATE_FAILED
    assert "orchestrator.buffer.sampler" in last.reason and "use only its arguments" in last.reason


async def test_a_sampler_is_refused_where_its_module_is_not_allowed(stack) -> None:
    with pytest.raises(InvalidSpecError, match="MILLRACE_CUSTOM_CODE is not set") as raised:
        await create(stack, run_id="refused", buffer=buffer("every_third"))
    assert raised.value.violations[0].field == "orchestrator.buffer.sampler"


@pytest.mark.parametrize("filters", ["shrink", "refill"])
async def test_a_function_that_waits_for_something_ends_the_run_in_time_and_not_the_orchestrator(
    allowing, filters: str
) -> None:
    _ = await allowing.env_server(), await allowing.inference(), await allowing.trainer()
    limits = {"advantage_timeout_s": 0.5, "filter_zero_advantages": filters}
    run = await create(allowing, run_id="waits", algo=algo("waits", run=float(filters == "refill")), **limits)
    events = await watch(allowing, run)
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_FAILED
    error = (await get(allowing, run)).error
    assert error.reason == "ADVANTAGES_SLOW" and "advantage_timeout_s" in error.remedy
    assert "were not computed within 0.5 s" in error.message
