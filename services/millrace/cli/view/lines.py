"""Format events as lines of text, for the progress of a run and for `millrace run logs`."""

import datetime

from millrace.cli.view.progress import EvalPoint, Progress, StepPoint
from millrace.cli.view.text import count, duration, printable, size
from millrace.runlog.run_status import resumed_words, state_name
from millrace.v1 import event_pb2

LONG_WAIT_S = 10.0  # shorter waits are ordinary and no news


def step_line(point: StepPoint, progress: Progress) -> str:
    """Return a line such as `step  12/60  reward 0.612  staleness 0.8/8  14.2k tok/s  0.91s (wait 0.33s, 36%)  kl
    1.2e-05  eta 43s`.
    """
    width = max(3, len(str(progress.max_steps)))
    of = f"/{progress.max_steps}" if progress.max_steps else ""
    bound = "" if progress.staleness_bound is None else f"/{progress.staleness_bound}"
    parts = [
        f"step {point.number:>{width}}{of}",
        f"reward {reward(point)}",
        f"staleness {point.staleness_mean:.1f}{bound}" if point.num_rollouts else "staleness –",
        f"{count(point.tokens_per_s) if point.tokens_per_s else '–'} tok/s",
        f"{point.step_s:.2f}s (wait {point.wait_s:.2f}s, {point.wait_ratio:.0%})",
    ]
    if point.kl is not None:
        parts.append(f"kl {point.kl:.1e}")
    if progress.eta_s is not None:
        parts.append(f"eta {duration(progress.eta_s)}")
    return "  ".join(parts)


def reward(point: StepPoint | EvalPoint) -> str:
    """Return the mean reward as text; a dash if there are no rollouts."""
    return f"{point.reward:.3f}" if point.num_rollouts else "–"


def progress_line(event: event_pb2.Event, progress: Progress) -> str | None:
    """Return the event's line for a follower of the run; None for routine events.

    The event must have been applied to `progress`.
    """
    match event.WhichOneof("body"):
        case "policy_published" | "policy_served" | "batch_committed" | "token_log_stored" | "workers_assigned" | None:
            return None
        case "wait_reported" if event.wait_reported.wait.age_seconds < LONG_WAIT_S:
            return None
        case "state_changed" if event.state_changed.HasField("error"):  # the follower says the error at its end, once
            change = event.state_changed
            return printable(f"{_states(change)} [{change.error.reason}]")
        case _:
            return event_line(event, progress)


def is_of_level(event: event_pb2.Event, level: str | None) -> bool:
    """Return whether the event has the level `level`, "error" or "warning", or a worse one; True for any other level
    and None.

    A failure of the run is an error; warnings and failed rollouts are warnings.
    """
    is_error = event.HasField("state_changed") and event.state_changed.HasField("error")
    is_warning = is_error or event.HasField("warning") or event.HasField("rollouts_failed")
    return {"error": is_error, "warning": is_warning}.get(level or "", True)


def event_line(event: event_pb2.Event, progress: Progress) -> str:
    """Return any event as one line.

    `progress` is the run's and includes this event already. Control characters are replaced, because environment errors
    may quote what a model wrote.
    """
    return printable(progress.short(_event_words(event, progress)).replace("\n", " ⏎ "))


def _event_words(event: event_pb2.Event, progress: Progress) -> str:
    """Return an event as text: what has happened, with its figures.

    `progress` is the run's and includes this event already: the figures of a step are read from it.
    """
    match event.WhichOneof("body"):
        case "state_changed":
            change = event.state_changed
            if change.HasField("error"):
                remedy = f"; {change.error.remedy}" if change.error.remedy else ""
                return f"{_states(change)} [{change.error.reason}]  {change.error.message}{remedy}"
            return f"{_states(change)}  {change.reason}".rstrip()
        case "step_completed":
            return step_line(progress.steps[-1], progress)
        case "eval_completed":
            done = event.eval_completed
            mean = f"{done.reward_mean:.3f}" if done.num_rollouts else "–"
            failed = f", {done.num_failed} failed" if done.num_failed else ""
            spans = f"–v{done.policy_version_max}" if done.policy_version_max > done.policy_version else ""
            policy = f"  policy v{done.policy_version}{spans}" if progress.has_versions else ""
            return (
                f"eval {done.env}{policy}  reward {mean}"
                f"  ({done.num_rollouts + done.num_failed} rollouts{failed}, {done.seconds:.1f}s)"
            )
        case "rollouts_failed":
            return f"rollouts fail: {event.rollouts_failed.message}"
        case "policy_published":
            return published_line(event.policy_published)
        case "policy_served":
            new = event.policy_served
            fetched = f"  fetched {size(new.fetched_bytes)}" if new.full_bytes else ""
            return f"policy v{new.version} served by {new.replica}  paused {new.pause_seconds:.3f}s{fetched}"
        case "token_log_stored":
            stored = event.token_log_stored
            return f"log-probs of step {stored.step + 1} are stored ({size(stored.size_bytes)})"
        case "checkpoint_saved":
            saved = event.checkpoint_saved
            return f"checkpoint of step {saved.step} saved  {size(saved.size_bytes)}  {saved.uri}"
        case "training_resumed":
            return resumed_words(event.training_resumed)
        case "workers_assigned":
            given = event.workers_assigned
            return f"accelerators: {given.trainer_accelerators} train, {given.replica_accelerators} generate"
        case "score_completed":
            done = event.score_completed
            return (
                f"score of policy v{done.version}  mismatch kl {done.mismatch_kl:.1e}"
                f"  largest log-prob difference {done.max_abs_logprob_diff:.1e}  ({done.num_tokens} tokens)"
            )
        case "batch_committed":
            return batch_line(event.batch_committed)
        case "warning":
            return f"warning: {event.warning.message} [{event.warning.reason}]"
        case "wait_reported":
            return wait_line(event.wait_reported.wait)
        case _:
            return "an event of a kind that this version does not know"


def _states(change: event_pb2.StateChanged) -> str:
    """Return a change of state as text, such as `QUEUED -> STARTING`."""
    return f"{state_name(change.old_state)} -> {state_name(change.new_state)}"


def published_line(new: event_pb2.PolicyPublished) -> str:
    """Return a line such as `policy v12 published  1.2 MiB in 0.31s  delta, 4.1% of 29 MiB, 3.20% changed`."""
    line = f"policy v{new.version} published  {size(new.size_bytes)} in {new.seconds:.2f}s"
    if not new.full_bytes:  # of an older release
        return line
    changed = "" if new.changed_fraction == 1 else f", {new.changed_fraction:.2%} changed"
    return f"{line}  {new.codec}, {new.size_bytes / new.full_bytes:.1%} of {size(new.full_bytes)}{changed}"


def batch_line(batch: event_pb2.BatchCommitted) -> str:
    """Return a line such as `batch of step 12 committed  8 trained, dropped: 2 zero_advantage, filters found: 1
    repetition`.
    """
    dropped = ", ".join(f"{number} {reason}" for reason, number in sorted(batch.dropped.items()))
    found = ", ".join(f"{number} {name}" for name, number in sorted(batch.filtered.items()))
    line = f"batch of step {batch.step + 1} committed  {batch.num_trained} trained"
    return line + (f", dropped: {dropped}" if dropped else "") + (f", filters found: {found}" if found else "")


def wait_line(wait: event_pb2.Wait) -> str:
    """Return a line such as `trainer-0 waits for batch 12 ← orchestrator (3.2s of 60s)`."""
    on = f" ← {wait.waits_on}" if wait.waits_on else ""
    limit = f" of {wait.deadline_seconds:g}s" if wait.deadline_seconds else ""
    late = ", overdue" if 0 < wait.deadline_seconds < wait.age_seconds else ""
    return f"{wait.owner} waits for {wait.reason}{on} ({wait.age_seconds:.1f}s{limit}{late})"


def log_line(event: event_pb2.Event, progress: Progress) -> str:
    """Return an event as a line that begins with its time (UTC) and its writer."""
    time = datetime.datetime.fromtimestamp(event.time.ToNanoseconds() / 1e9, tz=datetime.UTC)
    writer = progress.short(event.writer)
    return f"{time:%H:%M:%S}.{time.microsecond // 1000:03d}  {writer:<16}  {event_line(event, progress)}"
