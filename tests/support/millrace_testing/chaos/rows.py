"""The rows of the failure table that kill one process at a named point; for the tests and for the benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.telemetry.faults import Point


@dataclass(frozen=True)
class Row:
    """Who dies where: `when` are the lowest values of the point's numbers."""

    victim: str
    point: Point
    when: Mapping[str, int]


RETENTION = {
    "ckpt.interval": 2,
    "ckpt.keep_last": 2,
    "orchestrator.retain_batches": 2,
    "orchestrator.retain_policies": 2,
    "trainer.policy.anchor_interval": 2,
}
"""Overrides by which a short run retires all that can be retired."""

ROWS = {
    "env-server mid-episode": Row("env-server", Point.ENV_SERVER_MID_EPISODE, {"step": 2}),
    "env-server before append": Row("env-server", Point.ENV_SERVER_BEFORE_APPEND, {"step": 2}),
    "env-server after append": Row("env-server", Point.ENV_SERVER_AFTER_APPEND, {"step": 2}),
    "engine mid-decode": Row("inference", Point.INFERENCE_MID_DECODE, {"version": 1}),
    "engine mid-download": Row("inference", Point.INFERENCE_MID_DOWNLOAD, {"version": 2}),
    "engine mid-apply": Row("inference", Point.INFERENCE_MID_APPLY, {"version": 2}),
    "orchestrator after dispatch": Row("orchestrator", Point.ORCHESTRATOR_AFTER_DISPATCH, {"step": 2}),
    "orchestrator after rollouts arrived": Row("orchestrator", Point.ORCHESTRATOR_AFTER_ROLLOUTS, {"step": 2}),
    "orchestrator mid-commit": Row("orchestrator", Point.ORCHESTRATOR_MID_COMMIT, {"step": 2}),
    "orchestrator after header": Row("orchestrator", Point.ORCHESTRATOR_AFTER_HEADER, {"step": 2}),
    "orchestrator after commit": Row("orchestrator", Point.ORCHESTRATOR_AFTER_COMMIT, {"step": 2}),
    "trainer mid-backward": Row("trainer", Point.TRAINER_MID_BACKWARD, {"step": 3}),
    "trainer after step before publish": Row("trainer", Point.TRAINER_AFTER_STEP, {"step": 3}),
    "trainer before upload": Row("trainer", Point.TRAINER_BEFORE_UPLOAD, {"version": 4}),
    "trainer after upload before manifest": Row("trainer", Point.TRAINER_BEFORE_MANIFEST, {"version": 4}),
    "trainer after manifest": Row("trainer", Point.TRAINER_AFTER_MANIFEST, {"version": 4}),
    "trainer after publish before checkpoint": Row("trainer", Point.TRAINER_AFTER_PUBLISH, {"step": 3}),
    "trainer mid-checkpoint": Row("trainer", Point.TRAINER_MID_CHECKPOINT, {"step": 4}),
}
