"""Where a rollout or a policy version comes from and what came of it, as indented lines."""

import datetime
from collections.abc import Iterator

from millrace.cli.view.text import printable, size
from millrace.v1 import lineage_pb2, rollout_pb2
from millrace.v1 import run_service_pb2 as rs

_MOST_STEPS = 24


def lineage_lines(found: rs.GetLineageResponse) -> list[str]:
    """The story of what was asked for, the past first."""
    if found.WhichOneof("lineage") == "rollout":
        return list(_of_rollout(found.rollout))
    return list(_of_version(found.version))


def _of_rollout(found: lineage_pb2.RolloutLineage) -> Iterator[str]:
    yield from _rollout(found.rollout)
    yield "made by"
    for each in found.made_by:
        yield from _version(each, with_batch=True)
    if not found.made_by:
        yield "  no policy: nothing of it was sampled"
    yield "trained on in" if found.rollout.is_trained else "resolved by, and not trained on in"
    yield from _batch(found.batch)
    if found.HasField("became"):
        yield "which made"
        yield from _version(found.became)


def _of_version(found: lineage_pb2.VersionLineage) -> Iterator[str]:
    yield from _version(found.version)
    if found.version.HasField("batch"):
        yield "made from"
        yield from _batch(found.version.batch)
        yield from _some(found.made_from)
    yield "sampled tokens of"
    yield from _some(found.made)
    if found.trained_steps:
        steps = ", ".join(str(batch + 1) for batch in found.trained_steps[:_MOST_STEPS])
        more = " …" if len(found.trained_steps) > _MOST_STEPS else ""
        yield f"  trained on in step{'s' if len(found.trained_steps) > 1 else ''} {steps}{more}"
    yield "next"
    if found.HasField("next"):
        yield from _version(found.next)
    else:
        yield f"  version {found.version.version + 1} is not there"


def _version(each: lineage_pb2.TracedVersion, *, with_batch: bool = False) -> Iterator[str]:
    tokens = f"  {each.num_tokens} tokens" if each.num_tokens else ""
    yield f"  policy v{each.version}{tokens}{_published(each)}"
    if each.digest:
        yield f"    digest      {each.digest}"
    if each.uri:
        yield f"    manifest    {each.uri}"
    if each.replicas:
        yield f"    served by   {', '.join(dict.fromkeys(map(printable, each.replicas)))}"
    if each.HasField("checkpoint"):
        saved = each.checkpoint
        yield f"    checkpoint  step {saved.step}  {size(saved.size_bytes)}  {saved.uri}"
    if with_batch and each.HasField("batch"):
        yield f"    made from   batch {each.batch.step}  {each.batch.key or '(not there)'}"


def _published(each: lineage_pb2.TracedVersion) -> str:
    if each.HasField("publish_time"):
        when = each.publish_time.ToDatetime(datetime.UTC)
        return f"  published {when:%Y-%m-%d %H:%M:%S} UTC, {size(each.size_bytes)} ({each.codec or '?'})"
    return "  the start policy" if each.version == 0 else "" if each.is_known else "  not published yet"


def _batch(each: lineage_pb2.TracedBatch) -> Iterator[str]:
    if not each.key:
        yield f"  step {each.step + 1}, whose batch {each.step} is not there"
        return
    reward = f", mean reward {each.reward_mean:.3f}" if each.HasField("reward_mean") else ""
    done = "" if each.is_done else "  (the step is not done)"
    which = f"step {each.step + 1}, batch {each.step}"
    yield f"  {which}: {each.num_rollouts} rollouts, {each.num_trained} trained on{reward}{done}"
    if each.dropped:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(each.dropped.items()))
        yield f"    groups dropped: {printable(dropped)}"
    yield f"    batch       {each.key}"
    if each.problem:
        yield f"    problem     {printable(each.problem)}"


def _some(found: lineage_pb2.TracedRollouts) -> Iterator[str]:
    if not found.num_rollouts:
        yield "  no rollout that is resolved"
        return
    shown = ", ".join(_id(each) for each in found.rollouts)
    more = found.num_rollouts - len(found.rollouts)
    yield f"  {found.num_rollouts} rollouts: {shown}{f', and {more} more' if more else ''}"


def _rollout(each: rollout_pb2.Rollout) -> Iterator[str]:
    reward = f"{each.reward:.3f}" if each.HasField("reward") else "–"
    advantage = f"  advantage {each.advantage:+.3f}" if each.HasField("advantage") else ""
    yield (
        f"sample {_id(each)}  {printable(each.env)}  task {each.ordinal}.{each.member}  {each.status}"
        f"  reward {reward}{advantage}  {each.num_tokens} tokens"
    )
    for label, text in (("prompt", each.prompt), ("completion", each.completion)):
        if text:
            yield f"  {label:<12}{printable(text.replace(chr(10), '⏎'))[:100]}"


def _id(each: rollout_pb2.Rollout) -> str:
    return each.name.rpartition("/")[2]
