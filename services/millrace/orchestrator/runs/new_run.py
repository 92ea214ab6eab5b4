"""From a CreateRun request to the record of a run, or to every violation at once."""

import datetime
import hashlib
import json
import uuid
from collections.abc import Callable

import millrace
from millrace.config import EvalRunConfig, RLConfig
from millrace.config.load import validate_document
from millrace.errors import InvalidSpecError, Violation
from millrace.runlog import run_name
from millrace.runlog.names import check_request_id, new_uid
from millrace.runlog.records.run_record import EVAL, RL, RunRecord
from millrace.v1 import run_pb2, run_service_pb2

MAX_LABELS, MAX_LABEL_CHARS = 64, 256
KINDS = {run_pb2.RUN_KIND_RL: RL, run_pb2.RUN_KIND_EVAL: EVAL}


def validate(request: run_service_pb2.CreateRunRequest) -> RLConfig | EvalRunConfig:
    """The config of the run, or InvalidSpecError with every violation of the request."""
    violations: list[Violation] = []
    if request.run_id and not run_name.is_legal(request.run_id):
        violations.append(Violation(field="run_id", value=request.run_id, message=run_name.RULE))
    if request.kind not in KINDS:
        known = request.kind in run_pb2.RunKind.values()
        kind = run_pb2.RunKind.Name(request.kind) if known else str(request.kind)
        message = "only RUN_KIND_RL and RUN_KIND_EVAL run as a service; run `millrace sft` for SFT"
        violations.append(Violation(field="kind", value=kind, message=message))
    violations += _label_problems(request)
    if request.request_id:
        violations += _violations(check_request_id, request.request_id)
    document = request.config_json
    is_eval = request.kind == run_pb2.RUN_KIND_EVAL
    try:
        config = validate_document(document, EvalRunConfig) if is_eval else validate_document(document)
    except InvalidSpecError as error:
        raise InvalidSpecError([*violations, *error.violations]) from error
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


def make_record(request: run_service_pb2.CreateRunRequest, config: RLConfig | EvalRunConfig) -> RunRecord:
    """The run's record under a new uid."""
    document = json.loads(config.resolved_json())
    uid = new_uid()
    return RunRecord(
        uid=uid,
        name=request.run_id or config.run.name or _make_name(config, uid),
        kind=KINDS[request.kind],
        config=document,
        run_hash=hashlib.sha256(config.resolved_json().encode()).hexdigest(),
        request_id=request.request_id or str(uuid.uuid4()),
        create_time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        code_version=millrace.__version__,
        labels=dict(request.labels),
    )


def _make_name(config: RLConfig | EvalRunConfig, uid: str) -> str:
    """`{first env}-{last hex digits of the uid}`; evaluations begin with `eval-`."""
    is_eval = isinstance(config, EvalRunConfig)
    first = config.env[0] if is_eval else config.orchestrator.env[0]
    return run_name.make(f"{'eval-' if is_eval else ''}{first.name or first.id}", uid[-6:])


def _label_problems(request: run_service_pb2.CreateRunRequest) -> list[Violation]:
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
    try:
        check(value)
    except InvalidSpecError as error:
        return error.violations
    return ()
