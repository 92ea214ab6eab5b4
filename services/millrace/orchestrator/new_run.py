"""From a CreateRun request to the record of a run, or to every violation at once."""

import datetime
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import millrace
from millrace.config import EvalRunConfig, RLConfig
from millrace.config.load import validate_document
from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, Violation
from millrace.runlog import names
from millrace.runlog.fork import ForkPlan
from millrace.runlog.names import check_request_id, new_uid
from millrace.runlog.records.run_record import EVAL, RL, RunRecord
from millrace.v1 import run_pb2, run_service_pb2

MAX_LABELS, MAX_LABEL_CHARS = 64, 256
KINDS = {run_pb2.RUN_KIND_RL: RL, run_pb2.RUN_KIND_EVAL: EVAL}


def validate(request: run_service_pb2.CreateRunRequest, *, tenant: str = "") -> RLConfig | EvalRunConfig:
    """Check a tenant's request to create a run, and return its config; `tenant` is empty for an operator.

    Raises InvalidSpecError with every violation at once.
    """
    violations: list[Violation] = []
    if request.run_id and not names.is_legal(request.run_id):
        violations.append(Violation(field="run_id", value=request.run_id, message=names.RULE))
    violations += _too_long("run_id", request.run_id, tenant)
    if request.kind not in KINDS:
        known = request.kind in run_pb2.RunKind.values()
        kind = run_pb2.RunKind.Name(request.kind) if known else str(request.kind)
        message = "only RUN_KIND_RL and RUN_KIND_EVAL run as a service; run `millrace sft` for SFT"
        violations.append(Violation(field="kind", value=kind, message=message))
    violations += _label_problems(request)
    if request.request_id:
        violations += _violations(check_request_id, names.of_tenant(tenant, request.request_id))
    document = request.config_json
    is_eval = request.kind == run_pb2.RUN_KIND_EVAL
    try:
        config = validate_document(document, EvalRunConfig) if is_eval else validate_document(document)
    except InvalidSpecError as error:
        raise InvalidSpecError([*violations, *error.violations]) from error
    violations += _too_long("run.name", "" if request.run_id else config.run.name or "", tenant)
    if isinstance(config, RLConfig) and any(
        p and p.resume_step is not None for p in (config.ckpt, config.trainer.ckpt)
    ):
        message = "is for the commands that start a run: a service is asked with ResumeRun, or with ForkRun for a step"
        violations.append(Violation(field="ckpt.resume_step", message=message))
    if isinstance(config, EvalRunConfig) and config.client is None:
        message = "is required here: name the endpoint, or let `millrace eval` start one by leaving --server out"
        violations.append(Violation(field="client.base_url", message=message))
    if violations:
        raise InvalidSpecError(violations)
    return config


def make_record(
    request: run_service_pb2.CreateRunRequest, config: RLConfig | EvalRunConfig, *, tenant: str = ""
) -> RunRecord:
    """Return the record, under a new uid, of a run of `tenant`, which is empty for an operator.

    Its name is the request's, else the config's, else one made of environment and uid; a tenant's begins with the
    tenant, and so does the id of its request.
    """
    document = json.loads(config.resolved_json())
    uid = new_uid()
    name = request.run_id or config.run.name or _make_name(config, uid, most=_room(tenant))
    return RunRecord(
        uid=uid,
        name=names.of_tenant(tenant, name),
        kind=KINDS[request.kind],
        config=document,
        run_hash=hashlib.sha256(config.resolved_json().encode()).hexdigest(),
        request_id=names.of_tenant(tenant, request.request_id or str(uuid.uuid4())),
        create_time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        code_version=millrace.__version__,
        labels=dict(request.labels),
        tenant=tenant,
    )


def _room(tenant: str) -> int:
    """Return how many characters a tenant's name of a run may have, so that the whole name is legal."""
    return names.MAX_NAME - len(names.of_tenant(tenant, ""))


def _too_long(field: str, name: str, tenant: str) -> list[Violation]:
    """Return the violation that a name leaves no room for the tenant in front of it; empty if there is room."""
    if len(name) <= _room(tenant):
        return []
    message = (
        f"may have {_room(tenant)} characters: with the tenant in front of it the name has at most {names.MAX_NAME}"
    )
    return [Violation(field=field, value=name, message=message)]


def _make_name(config: RLConfig | EvalRunConfig, uid: str, *, most: int) -> str:
    """Return a legal name: that of the first environment (its id if it has none), and the last six digits of the uid.

    It has at most `most` characters. The name of an evaluation begins with `eval-`.
    """
    is_eval = isinstance(config, EvalRunConfig)
    first = config.env[0] if is_eval else config.orchestrator.env[0]
    return names.make(f"{'eval-' if is_eval else ''}{first.name or first.id}", uid[-6:], most=most)


def _label_problems(request: run_service_pb2.CreateRunRequest) -> list[Violation]:
    """Return what is wrong with the labels of a request; empty if nothing is."""
    if len(request.labels) > MAX_LABELS:
        message = f"has {len(request.labels)} labels; at most {MAX_LABELS} are taken"
        return [Violation(field="labels", message=message)]
    rule = f"a label has at most {MAX_LABEL_CHARS} characters in its key and as many in its value, and a key"
    return [
        Violation(field="labels", value=key[:80], message=rule)
        for key, value in request.labels.items()
        if not 0 < len(key) <= MAX_LABEL_CHARS or len(value) > MAX_LABEL_CHARS
    ]


def _violations(check: Callable[[str], object], value: str) -> tuple[Violation, ...]:
    """Return the violations that `check` raises for a value; empty if it accepts the value."""
    try:
        check(value)
    except InvalidSpecError as error:
        return error.violations
    return ()


# What a fork's request must say: a run config that can go on from the parent's state at the step.


def as_create(
    request: run_service_pb2.ForkRunRequest, parent: RunRecord, *, uid: str
) -> run_service_pb2.CreateRunRequest:
    """Return the request that creates the fork which `request` asks for, with the parent's config unless it brings its
    own.

    Unless a name is given, it is made of the parent's, the step and the end of `uid`, the fork's.
    """
    return run_service_pb2.CreateRunRequest(
        kind=run_pb2.RUN_KIND_RL,
        run_id=request.run_id
        or names.make(
            names.within(parent.tenant, parent.name), f"at-{request.step}-{uid[-4:]}", most=_room(parent.tenant)
        ),
        config_json=_with_own_wandb_run(request.config_json or parent.config_json, parent),
        request_id=request.request_id,
        labels=request.labels,
    )


def _with_own_wandb_run(config_json: str, parent: RunRecord) -> str:
    """Return a config without the W&B id if that is the parent's: W&B would mix the parent's rows with the fork's.

    A config that cannot be decoded is returned as it is: its validation reports that.
    """
    theirs = (parent.config or {}).get("wandb") or {}
    try:
        document = decode_object(config_json.encode(), what="config_json", reason="CONFIG_INVALID")
    except CorruptObjectError:
        return config_json  # the check reports what is wrong with it
    wandb = document.get("wandb")
    if not isinstance(wandb, dict) or wandb.get("id") is None or wandb["id"] != theirs.get("id"):
        return config_json
    return json.dumps({**document, "wandb": {**wandb, "id": None}})


def check_config(config: RLConfig, parent: RunRecord, plan: ForkPlan) -> None:
    """Raise InvalidSpecError if a fork's config cannot continue the parent's weights.

    `plan` says with which checkpoint of the parent the fork begins. The fork's trainer computes the steps from there to
    the fork's first one again. They only give the parent's version back under the parent's trainer settings: raise
    InvalidStateError if the config has others, unless there is a checkpoint at that very step.
    """
    before = parent.training
    violations = []
    if config.trainer.model.name != before.trainer.model.name:
        violations.append(
            Violation(
                field="trainer.model.name",
                value=config.trainer.model.name,
                message=f"must be {before.trainer.model.name!r}: a fork continues the parent's weights",
            )
        )
    if config.max_steps is not None and config.max_steps <= plan.step:
        violations.append(
            Violation(
                field="max_steps",
                value=str(config.max_steps),
                message=f"must be above {plan.step}, the step that the fork begins with",
            )
        )
    if violations:
        raise InvalidSpecError(violations)
    # With a checkpoint at the very step nothing is computed again, so that every setting may differ.
    changed = _changed(_relevant(before, plan), _relevant(config, plan))
    if changed and plan.step != plan.base_step:
        raise InvalidStateError(
            f"a fork of {plan.name!r} at step {plan.step} begins with checkpoint {plan.base_step} and computes the "
            f"steps between again, which needs the parent's settings; changed: {', '.join(changed)}",
            reason="FORK_NEEDS_CHECKPOINT",
            remedy=f"choose a step that has a checkpoint ({_steps(plan.checkpoints)}), or leave these settings",
            metadata={"checkpoints": ",".join(map(str, plan.checkpoints))},
        )


def is_same_fork(record: RunRecord, earlier: RunRecord) -> bool:
    """Return whether both runs are forks of one step of one run, or neither is a fork."""
    if record.parent is None or earlier.parent is None:
        return record.parent is earlier.parent
    return all(record.parent[name] == earlier.parent[name] for name in ("uid", "step"))


def _relevant(config: RLConfig, plan: ForkPlan) -> dict[str, Any]:
    """Return the settings that a trained step of a fork depends on, by dotted key: `trainer.…`, and the seed.

    Left out are the trainer's settings of checkpoints, its last step under a constant schedule, and the seed if the
    fork begins with a checkpoint.
    """
    trainer = json.loads(config.trainer.model_dump_json())
    # Where and when checkpoints are written changes no weight.
    del trainer["ckpt"]
    if config.trainer.scheduler.type == "constant":
        del trainer["max_steps"]  # a constant schedule has no end
    # A checkpoint has the random state, so the seed only counts where there is none.
    flat: dict[str, Any] = {} if plan.base_step else {"seed": config.seed}
    for section, value in trainer.items():
        if isinstance(value, Mapping):
            flat |= {f"trainer.{section}.{name}": inner for name, inner in value.items()}
        else:
            flat[f"trainer.{section}"] = value
    return flat


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, sorted; a key that one side lacks counts as None there."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _steps(steps: tuple[int, ...]) -> str:
    """Return the last eight of these steps in words."""
    shown = ", ".join(map(str, steps[-8:]))
    return shown if len(steps) <= 8 else f"…, {shown}"
