"""Rollouts for the orchestrator's tests."""

import numpy as np

from millrace.orchestrator.play.book import Book
from millrace.orchestrator.play.play import Play
from millrace.orchestrator.play.settings import PlaySettings
from millrace.orchestrator.play.tasks import TaskRef
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutError, RolloutStatus, Sample


def make_sample(*, version: int = 0, length: int = 6, prompt: int = 2) -> Sample:
    mask = np.array([0] * prompt + [1] * (length - prompt), dtype=np.uint8)
    return Sample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask == 1, np.float32(-1.0), np.float32(0.0)).astype(np.float32),
        policy_spans=(PolicySpan(lineage=0, version=version, start=prompt, end=length),),
    )


def make_rollout(
    ordinal: int,
    member: int,
    *,
    reward: float = 0.0,
    attempt: int = 0,
    group_size: int = 4,
    status: RolloutStatus = RolloutStatus.OK,
    version: int = 0,
    entry_id: str = "",
    env_server: str = "",
) -> Rollout:
    ok = status == RolloutStatus.OK
    return Rollout(
        run_uid="r1",
        purpose=Purpose.TRAIN,
        ordinal=ordinal,
        member=member,
        attempt=attempt,
        group_size=group_size,
        env="reverse-text",
        task_index=ordinal,
        task_id=f"train/{ordinal}",
        status=status,
        error=None if ok else RolloutError(type="Error", message="it broke"),
        samples=(make_sample(version=version),) if ok else (),
        reward=reward,
        entry_id=entry_id,
        env_server=env_server,
    )


PLAYS = PlaySettings(
    purpose=Purpose.TRAIN,
    rollout_timeout_s=60.0,
    hopeless=frozenset({RolloutStatus.PROMPT_TOO_LONG, RolloutStatus.QUARANTINED}),
)


def make_play(
    ordinal: int = 0, *, group_size: int = 2, settings: PlaySettings = PLAYS, scored_whole: bool = False
) -> Play:
    task = TaskRef(ordinal=ordinal, env="reverse-text", task_index=ordinal)
    return Play(task=task, group_size=group_size, settings=settings, is_scored_whole=scored_whole)


def book_with(*ordinals: int, group_size: int = 2, scored_whole: bool = False) -> Book:
    book = Book()
    for ordinal in ordinals:
        book.plays[ordinal] = make_play(ordinal, group_size=group_size, scored_whole=scored_whole)
    return book


def archived(book: Book) -> list[Rollout]:
    """Return what the next header archives."""
    with book.committing() as rollouts:
        return rollouts
