"""Cutting a batch: which finished groups become step n, and the header that resolves their ordinals."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.algorithms import Algorithm, Baselines, Credit, Credited, count_found
from millrace.config import ZeroAdvantageFilter
from millrace.config.sections.filters import FilterConfig
from millrace.decoding import Fields, decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.play.book import Resolved
from millrace.orchestrator.play.failures import Tally, decode_tally, encode_tally
from millrace.orchestrator.play.play import Play
from millrace.orchestrator.play.pools import Pools
from millrace.rollouts.types import Rollout, Sample, TrainSample

_MAX_BASELINES = 1 << 20


@dataclass(slots=True, kw_only=True)
class CutBatch:
    """One step's samples and everything that its header says about them."""

    step: int
    samples: list[TrainSample]
    rewards: list[float]
    resolved: list[Resolved] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    """Rollouts that filters found, by type."""
    baselines: Baselines = field(default_factory=Baselines)
    """Those behind this batch."""


def credit_group(group: Play, algorithm: Algorithm, *, seq_len: int) -> list[Credited]:
    """Give a whole group its credit; return its samples, cut at `seq_len` tokens, that have a sampled token left."""
    rollouts = group.rollouts()
    credits = algorithm.credit(rollouts)
    for rollout, own in zip(rollouts, credits, strict=True):
        if not all(np.isfinite(credit.advantages).all() for credit in own):
            raise _absurd(rollout)
    return [
        Credited(rollout=rollout, sample=sample, credit=credit, num_tokens=min(sample.num_tokens, seq_len), place=place)
        for rollout, own in zip(rollouts, credits, strict=True)
        for sample, credit, place in zip(rollout.samples, own, rollout.trace_of_sample, strict=True)
        if sample.loss_mask[:seq_len].any()
    ]


def _absurd(rollout: Rollout) -> InvalidSpecError:
    """What is said where the config makes of a rollout's reward what float32 cannot hold."""
    message = (
        f"make of the reward {rollout.reward:g} of ordinal {rollout.ordinal}, member {rollout.member}, environment "
        f"{rollout.env!r} an advantage that is no finite number; lower what is taken off (`filters`, `overlong`)"
    )
    return InvalidSpecError([Violation(field="orchestrator.algo", value="", message=message, source="a rollout")])


def _number(value: int | None) -> int:
    """Return a version's number as a batch has it: 0 where no span is known."""
    return 0 if value is None else value


def train_sample(item: Credited, credit: Credit, *, seq_len: int) -> TrainSample:
    """One row of a batch: the first `seq_len` tokens of a sample, their credit, and the facts of the rollout."""
    rollout, sample = item.rollout, item.sample
    return TrainSample(
        token_ids=sample.token_ids[:seq_len],
        loss_mask=sample.loss_mask[:seq_len],
        inference_logprobs=sample.inference_logprobs[:seq_len],
        advantages=credit.advantages[:seq_len],
        ordinal=rollout.ordinal,
        member=rollout.member,
        attempt=rollout.attempt,
        env=rollout.env,
        reward=item.trace.reward,
        temperature=rollout.temperature,
        truncation=rollout.truncation,
        own_sampling=tuple(
            replace(own, end=min(own.end, seq_len)) for own in sample.own_sampling if own.start < seq_len
        ),
        reference_kl=credit.reference_kl,
        min_version=_number(sample.min_version),
        max_version=_number(sample.max_version),
        lineage=_number(sample.lineage),
        mean_version=sample.mean_version(seq_len),
        rl_weights=None if credit.rl_weights is None else credit.rl_weights[:seq_len],
        ce_weights=None if credit.ce_weights is None else credit.ce_weights[:seq_len],
    )


def cut(
    groups: Sequence[Play],
    algorithms: Mapping[str, Algorithm],
    *,
    step: int,
    filter_zero_advantages: ZeroAdvantageFilter,
    seq_len: int,
    filters: Sequence[FilterConfig] = (),
    baselines: Baselines = Baselines(),  # noqa: B008 - immutable
) -> CutBatch:
    """Make a batch of whole groups, with the algorithm of each one's environment.

    An algorithm that several environments share finishes all of their samples together. Only then are samples without
    an advantage left out, if the config lets the batch shrink. A group of which nothing is left is resolved as dropped.
    Where batches are refilled, such groups were replaced before the cut, and the others stay whole, but for samples of
    which filters leave nothing.
    """
    is_shrinking = filter_zero_advantages in (True, "shrink")
    batch = CutBatch(step=step, samples=[], rewards=[])
    credited = [credit_group(group, algorithms[group.task.env], seq_len=seq_len) for group in groups]
    compared, batch.baselines = baselines.against([item for items in credited for item in items])
    credits = iter(finish(compared, algorithms))
    for group, items in zip(groups, credited, strict=True):
        final = [(item, credit) for item in items if not (credit := next(credits)).trains_nothing]
        kept = [(item, credit) for item, credit in final if not is_shrinking or has_advantage(item, credit)]
        batch.samples += [train_sample(item, credit, seq_len=seq_len) for item, credit in kept]
        batch.rewards += [rollout.reward for rollout in group.rollouts()]
        batch.filtered += count_found(group.rollouts(), filters)
        batch.resolved.append(Resolved.of(group, "" if kept else "zero_advantage"))
    return batch


def teaches(group: Play, algorithm: Algorithm, *, seq_len: int) -> bool:
    """Whether any sample of a whole group has an advantage; says the same of the group in every process."""
    return any(has_advantage(item, item.credit) for item in credit_group(group, algorithm, seq_len=seq_len))


def has_advantage(item: Credited, final: Credit) -> bool:
    """Whether a sample's group gave it any advantage, and the batch left it one; or it teaches what others said."""
    has_ce = final.ce_weights is not None and bool(final.ce_weights[: item.num_tokens].any())
    return has_ce or all(bool(credit.advantages[: item.num_tokens].any()) for credit in (item.credit, final))


def finish(credited: Sequence[Credited], algorithms: Mapping[str, Algorithm]) -> list[Credit]:
    """The final credit of a batch's samples, in order: each algorithm sees those of its own environments."""
    credits: dict[int, Credit] = {}
    for algorithm in {id(each): each for each in algorithms.values()}.values():
        places = [at for at, item in enumerate(credited) if algorithms[item.rollout.env] is algorithm]
        credits.update(zip(places, algorithm.finish([credited[at] for at in places]), strict=True))
    return [credits[at] for at in range(len(credited))]


def count_dropped(resolved: Sequence[Resolved]) -> Counter[str]:
    """Dropped ordinals by reason."""
    return Counter(item.reason for item in resolved if item.reason)


def resolutions(resolved: Sequence[Resolved]) -> list[batch_pb2.Resolution]:
    """The wire form of resolved ordinals, ascending."""
    return [
        batch_pb2.Resolution(
            ordinal=item.ordinal,
            env=item.env,
            task_id=item.task_id,
            outcome=batch_pb2.ORDINAL_OUTCOME_DROPPED if item.reason else batch_pb2.ORDINAL_OUTCOME_TRAINED,
            reason=item.reason,
            attempts=item.attempts,
        )
        for item in sorted(resolved, key=lambda item: item.ordinal)
    ]


def score_samples(rollouts: Sequence[Rollout], *, seq_len: int) -> list[TrainSample]:
    """The samples of an evaluation for the closing header: no advantage, scored but never trained on."""
    return [
        train_sample(item, item.credit, seq_len=seq_len)
        for rollout in rollouts
        for sample, place in zip(rollout.samples, rollout.trace_of_sample, strict=True)
        for item in [_uncredited(rollout, sample, place)]
    ]


def _uncredited(rollout: Rollout, sample: Sample, place: int) -> Credited:
    credit = Credit(advantages=np.zeros_like(sample.inference_logprobs))
    return Credited(rollout=rollout, sample=sample, credit=credit, num_tokens=sample.num_tokens, place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterState:
    """What a successor goes on counting with."""

    num_duplicates: int = 0
    read_until: str = ""
    failures: Tally = field(default_factory=Tally)
    pools: Pools | None = None
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """By environment and agent, the moving average of its rewards."""


def encode_state(
    *,
    next_ordinal: int,
    num_duplicates: int,
    read_until: str,
    failures: Tally,
    scored_whole: Sequence[str] = (),
    pools: Pools | None = None,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
) -> bytes:
    """The bounded orchestrator state of a header, for people and audits; a successor goes on counting with it.

    `read_until` is the newest entry of the rollout stream that was read: duplicates up to there are counted.
    `scored_whole` are the environments whose groups must come from one attempt; `pools` are there where draws depend
    on them, `baselines` where rae trains.
    """
    state = {
        "next_ordinal": next_ordinal,
        "num_duplicates": num_duplicates,
        "read_until": read_until,
        "scored_whole": sorted(scored_whole),
        "failures": encode_tally(failures),
    }
    if pools is not None:
        state["pools"] = pools.to_json()
    if baselines:
        state["baselines"] = [
            {"env": env, "agent": agent, "value": value}
            for env, agents in baselines.items()
            for agent, value in sorted(agents.items())
        ]
    return json.dumps(state, sort_keys=True).encode()


def decode_state(data: bytes) -> WriterState:
    """The state in a header; CorruptObjectError if it is none."""
    if not data:
        return WriterState()
    what, reason = "the orchestrator's state in the last header", "HEADER_CORRUPT"
    fields = Fields(decode_object(data, what=what, reason=reason))
    try:
        pools = fields.inner("pools") if fields.has("pools") else None
        return WriterState(
            pools=None if pools is None else Pools.from_json(pools),
            baselines=_decode_baselines(fields),
            num_duplicates=fields.integer("num_duplicates"),
            read_until=fields.text("read_until"),
            failures=decode_tally(fields.inner("failures")) if fields.has("failures") else Tally(),
        )
    except ValueError as error:
        raise CorruptObjectError(f"{what} cannot be read: {error}", reason=reason) from error


def _decode_baselines(fields: Fields) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for item in fields.objects("baselines", most=_MAX_BASELINES) if fields.has("baselines") else ():
        found.setdefault(item.text("env"), {})[item.text("agent")] = item.number("value")
    return found
