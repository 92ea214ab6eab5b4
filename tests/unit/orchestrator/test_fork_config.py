"""Which run configs a fork may have, and what it is called."""

import json

import pytest

from millrace.config import RLConfig
from millrace.config.load import validate_document
from millrace.errors import InvalidSpecError, InvalidStateError
from millrace.orchestrator.catalog import RunView
from millrace.orchestrator.new_run import as_create, check_config
from millrace.runlog import Frontier
from millrace.runlog.fork import ForkPlan
from millrace.runlog.records.run_record import RunRecord
from millrace.v1 import run_service_pb2

DOCUMENT = {
    "model": {"name": "m"},
    "max_steps": 10,
    "orchestrator": {"env": [{"id": "e"}], "rollouts_per_example": 4, "batch_size": 8},
}


def config(trainer: dict | None = None, **top: object) -> RLConfig:
    return validate_document({**DOCUMENT, "trainer": trainer or {}, **top})


def record(of: RLConfig, *, name: str = "parent", **fields) -> RunRecord:
    return RunRecord(
        uid="u",
        name=name,
        kind="RL",
        config=of.model_dump(mode="json"),
        run_hash="ab",
        request_id="r",
        create_time="2026-01-01T00:00:00.0Z",
        code_version="0",
        labels={},
        **fields,
    )


def plan(step: int, base_step: int) -> ForkPlan:
    return ForkPlan(
        uid="u",
        name="parent",
        step=step,
        base_step=base_step,
        checkpoints=(0, 4, 8),
        chain_hash=bytes(32),
        frontier=Frontier(),
    )


@pytest.mark.parametrize("step", [4, 6])
def test_an_equal_config_goes_on_anywhere(step):
    check_config(config(max_steps=20), record(config()), plan(step, 4))
    check_config(config(max_steps=None), record(config()), plan(step, 4))
    check_config(config({"ckpt": {"interval": 1}}), record(config()), plan(step, 4))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (config({"optim": {"lr": 0.5}}), "trainer.optim.lr"),
        (config({"loss": {"kl_tau": 0.5}}), "trainer.loss.kl_tau"),
        (config({"micro_batch_tokens": 5000}), "trainer.micro_batch_tokens"),
        (config({"determinism": "strict"}), "trainer.determinism"),
    ],
)
def test_other_settings_of_the_trainer_need_a_checkpoint_at_the_step(changed, named):
    check_config(changed, record(config()), plan(4, 4))
    with pytest.raises(InvalidStateError, match="begins with checkpoint 4 and computes the steps between") as raised:
        check_config(changed, record(config()), plan(6, 4))
    assert raised.value.reason == "FORK_NEEDS_CHECKPOINT"
    assert f"changed: {named}" in raised.value.message
    assert "choose a step that has a checkpoint (0, 4, 8)" in str(raised.value)


def test_the_end_of_a_schedule_changes_the_steps_before_it():
    linear = {"scheduler": {"type": "linear", "decay_steps": 5, "warmup_steps": 0}}
    with pytest.raises(InvalidStateError, match=r"changed: trainer\.max_steps"):
        check_config(config(linear, max_steps=20), record(config(linear)), plan(6, 4))


def test_the_seed_matters_only_to_a_start_without_a_checkpoint():
    check_config(config(seed=3), record(config()), plan(6, 4))
    with pytest.raises(InvalidStateError, match="changed: seed"):
        check_config(config(seed=3), record(config()), plan(2, 0))


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(InvalidSpecError) as raised:
        check_config(config(model={"name": "other"}, max_steps=4), record(config()), plan(4, 4))
    assert [str(violation) for violation in raised.value.violations] == [
        "trainer.model.name: must be 'm': a fork continues the parent's weights (got other)",
        "max_steps: must be above 4, the step that the fork begins with (got 4)",
    ]


def test_the_parents_config_and_a_name_of_the_parents_are_the_defaults():
    parent = record(config(), name="p" * 63)
    made = as_create(run_service_pb2.ForkRunRequest(step=7), parent, uid="0123abcd")
    assert made.config_json == parent.config_json
    assert made.run_id == f"{'p' * 53}-at-7-abcd" and len(made.run_id) <= 63
    wanted = run_service_pb2.ForkRunRequest(step=7, run_id="mine", config_json="{}", labels={"a": "b"})
    made = as_create(wanted, parent, uid="0123abcd")
    assert (made.run_id, made.config_json, dict(made.labels)) == ("mine", "{}", {"a": "b"})


def test_a_record_knows_its_parent_and_old_ones_have_none():
    forked = record(config(), parent=plan(6, 4).to_json())
    view = RunView(RunRecord.decode(forked.encode(), where="run.json"))
    assert (view.run.parent.name, view.run.parent.uid, view.run.parent.step) == ("runs/parent", "u", 6)
    assert (view.run.progress.step, view.run.progress.policy_version) == (4, 4)
    old = record(config())
    assert b"parent" not in old.encode().replace(b'"name": "parent"', b"")
    assert RunRecord.decode(old.encode(), where="run.json") == old and not RunView(old).run.HasField("parent")


def test_a_fork_does_not_write_into_the_run_of_its_parent_in_wandb():
    """Rows that the parent has written there would represent those of the fork."""
    parent = record(config(wandb={"id": "mine", "project": "p"}))

    def wandb_of(config_json: str) -> dict:
        return json.loads(
            as_create(run_service_pb2.ForkRunRequest(config_json=config_json), parent, uid="u" * 28).config_json
        )["wandb"]

    assert wandb_of("")["id"] is None and wandb_of("")["project"] == "p"
    assert wandb_of(config(wandb={"id": "mine"}).resolved_json())["id"] is None
    assert wandb_of(config(wandb={"id": "another"}).resolved_json())["id"] == "another"
