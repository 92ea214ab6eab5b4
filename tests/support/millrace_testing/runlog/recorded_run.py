"""The events of a small run, as a server would send them."""

from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from millrace.cli.view.progress import Progress
from millrace.v1 import event_pb2, run_pb2

START = 1_700_000_000


def at(seconds: float, writer: str = "orchestrator-1", **body) -> event_pb2.Event:
    nanos = round((START + seconds) * 1e9)
    time = Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)
    return event_pb2.Event(time=time, writer=writer, **body)


def state(seconds: float, old: str, new: str, reason: str = "", **more) -> event_pb2.Event:
    change = event_pb2.StateChanged(
        old_state=getattr(run_pb2, f"RUN_STATE_{old}"),
        new_state=getattr(run_pb2, f"RUN_STATE_{new}"),
        reason=reason,
        **more,
    )
    return at(seconds, state_changed=change)


def step(number: int, seconds: float, *, reward: float, step_s: float = 1.0, wait_s: float = 0.25) -> event_pb2.Event:
    done = event_pb2.StepCompleted(
        step=number,
        reward_mean=reward,
        staleness_mean=0.8,
        staleness_max=1,
        num_tokens=14200,
        num_rollouts=128,
        step_seconds=step_s,
        wait_seconds=wait_s,
        metrics={"mismatch_kl/mean": 1.2e-5, "loss/mean": 0.1},
    )
    return at(seconds, "trainer-0", step_completed=done)


def evaluation(
    version: int,
    seconds: float,
    reward: float,
    env: str = "reverse-text",
    *,
    step: int | None = None,
    newest: int = 0,
    skipped: Sequence[int] = (),
) -> event_pb2.Event:
    """Return the event of an evaluation.

    By default `step` and `newest`, the newest version that answered, are `version`.
    """
    done = event_pb2.EvalCompleted(
        env=env,
        policy_version=version,
        policy_version_max=max(newest, version),
        step=version if step is None else step,
        reward_mean=reward,
        num_rollouts=64,
        seconds=2.0,
        skipped=skipped,
    )
    return at(seconds, eval_completed=done)


def recorded(uid: str = "u1", policy_uri: str = "", checkpoint_uri: str = "") -> list[event_pb2.Event]:
    published = event_pb2.PolicyPublished(version=3, size_bytes=500_000, seconds=0.05, uri=policy_uri)
    return [
        state(0, "QUEUED", "STARTING", "claimed by an orchestrator"),
        at(1, "trainer-0", policy_published=event_pb2.PolicyPublished(version=0, size_bytes=500_000, uri="x")),
        at(1.5, policy_served=event_pb2.PolicyServed(replica="inference-1", version=0, pause_seconds=0.01)),
        state(2, "STARTING", "RUNNING", "workers, environments and policy are ready"),
        evaluation(0, 3, 0.45),
        at(4, batch_committed=event_pb2.BatchCommitted(step=0, num_trained=8, dropped={"zero_advantage": 2})),
        step(0, 5, reward=0.40, step_s=2.0, wait_s=1.5),
        at(5, warning=event_pb2.Warning(reason="STALE_GROUPS", message="3 groups dropped; raise max_off_policy_steps")),
        step(1, 6, reward=0.55),
        at(
            6,
            wait_reported=event_pb2.WaitReported(
                wait=event_pb2.Wait(
                    owner="trainer-0", reason="batch 3", age_seconds=12, waits_on="orchestrator", deadline_seconds=60
                )
            ),
        ),
        step(2, 7, reward=0.70),
        at(7, "trainer-0", policy_published=published),
        at(7.2, policy_served=event_pb2.PolicyServed(replica="inference-1", version=3, pause_seconds=0.01)),
        evaluation(3, 8, 0.75),
        state(9, "RUNNING", "STOPPING", "every step is done"),
        at(
            9.2,
            "trainer-0",
            score_completed=event_pb2.ScoreCompleted(
                version=3, num_tokens=600, mismatch_kl=2e-9, max_abs_logprob_diff=4e-6
            ),
        ),
        at(
            9.5,
            "trainer-0",
            checkpoint_saved=event_pb2.CheckpointSaved(step=3, uri=checkpoint_uri, size_bytes=1_400_000),
        ),
        state(10, "STOPPING", "SUCCEEDED", "done"),
    ]


def progress_of(events: list[event_pb2.Event], **options) -> Progress:
    progress = Progress(name="runs/reverse-text-7f3a", **{"uid": "u1", "max_steps": 3, "staleness_bound": 8, **options})
    for event in events:
        progress.apply(event)
    return progress
