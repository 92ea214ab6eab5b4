"""The states of a play, and what changes them; what a takeover makes of the plays of a predecessor."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import PlayingGroup
from millrace.orchestrator.play.book import Book
from millrace.orchestrator.play.intake import Intake
from millrace.orchestrator.play.play import Arrival, Play, PlayState
from millrace.rollouts.types import RolloutStatus
from millrace.runlog import Frontier
from millrace_testing.orchestrator.builders import PLAYS, archived, make_play, make_rollout

VERBS = {
    "place": lambda play: play.place("b", replica="y", timeout_s=60.0),
    "lose": lambda play: play.lose(),
    "resolve": lambda play: play.resolve("stale"),
}
AFTER = {
    (PlayState.UNPLACED, "place"): PlayState.PLACED,
    (PlayState.UNPLACED, "lose"): PlayState.UNPLACED,
    (PlayState.UNPLACED, "resolve"): PlayState.RESOLVED,
    (PlayState.PLACED, "lose"): PlayState.UNPLACED,
    (PlayState.PLACED, "resolve"): PlayState.RESOLVED,
    (PlayState.WHOLE, "resolve"): PlayState.RESOLVED,
}


def in_state(state: PlayState) -> Play:
    play = make_play()
    if state is PlayState.PLACED:
        play.place("a", replica="x", timeout_s=60.0)
    if state in (PlayState.WHOLE, PlayState.RESOLVED):
        for member in range(2):
            play.add(make_rollout(0, member, group_size=2))
    if state is PlayState.RESOLVED:
        play.resolve("")
    assert play.state is state
    return play


@pytest.mark.parametrize("state", PlayState)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_leads_from_a_state_to_the_one_of_the_table_or_is_refused(state: PlayState, verb: str) -> None:
    play = in_state(state)
    if (state, verb) in AFTER:
        VERBS[verb](play)
        assert play.state is AFTER[state, verb]
    else:
        with pytest.raises(AssertionError):
            VERBS[verb](play)
        assert play.state is state


@pytest.mark.parametrize("state", [PlayState.WHOLE, PlayState.RESOLVED])
def test_what_is_over_takes_nothing_and_follows_no_attempt(state: PlayState) -> None:
    play = in_state(state)
    assert play.add(make_rollout(0, 0, group_size=2, attempt=1)) is Arrival.DUPLICATE
    play.follow(3)
    assert (play.state, play.attempt, play.missing) == (state, 0, [])


def test_the_last_failure_of_a_placed_attempt_unplaces_it() -> None:
    play = in_state(PlayState.PLACED)
    play.add(make_rollout(0, 0, group_size=2))
    assert play.num_playing == 1
    assert play.add(make_rollout(0, 1, group_size=2, status=RolloutStatus.TIMEOUT)) is Arrival.RETRY
    assert (play.state, play.attempt, play.env_server, play.num_playing) == (PlayState.UNPLACED, 1, "", 0)


def intake_of(book: Book, *, has_predecessor: bool) -> Intake:
    policies = SimpleNamespace(replica_at=lambda url: "x", suspect=lambda worker_id: None)
    intake = Intake(book=book, evaluations={}, policies=cast("Any", policies))
    settings = replace(PLAYS, timeout_s=60.0)
    intake.begin(lambda ordinal, step: make_play(ordinal, settings=settings), has_predecessor=has_predecessor)
    return intake


class ReadStream:
    async def catch_up(self) -> None:
        """It was read."""


async def test_a_takeover_leaves_plays_that_go_on_to_who_plays_them_and_begins_the_next_attempt_of_others() -> None:
    book = Book()
    book.restore(step=1, frontier=Frontier(resolved_below=1))
    intake = intake_of(book, has_predecessor=True)
    for ordinal in range(4):
        intake.take(make_rollout(ordinal, 0, group_size=2, attempt=1, env_server="a"))
    intake.take(make_rollout(3, 1, group_size=2, attempt=1, env_server="a", status=RolloutStatus.ENV_ERROR))
    assert sorted(book.plays) == [1, 2, 3] and not any(play.env_server for play in book.plays.values())
    playing = [
        PlayingGroup(purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=ordinal, attempt=1, members=members)
        for ordinal, members in [(0, [1]), (1, [1]), (4, [0]), (5, [0, 1])]
    ]
    await intake.take_over(cast("Any", ReadStream()), {"a": playing})
    found = {ordinal: (play.state, play.env_server, play.attempt) for ordinal, play in book.plays.items()}
    assert found == {
        1: (PlayState.PLACED, "a", 1),
        2: (PlayState.UNPLACED, "", 2),
        3: (PlayState.UNPLACED, "", 3),  # its member had failed: attempt 2 was due, and nobody plays that
        4: (PlayState.UNPLACED, "", 2),  # member 1 is played by nobody
        5: (PlayState.PLACED, "a", 1),
    }


async def test_a_rollout_that_nobody_here_asked_for_opens_its_play_where_it_came_from() -> None:
    book = Book()
    intake = intake_of(book, has_predecessor=False)
    intake.take(make_rollout(7, 0, group_size=2, attempt=2, env_server="a"))
    play = book.plays[7]
    assert (play.state, play.env_server, play.attempt, play.missing) == (PlayState.PLACED, "a", 2, [1])
    assert book.next_ordinal() == 0


def test_what_is_read_before_the_environments_are_known_is_noted_and_can_be_resolved() -> None:
    counted: list[tuple[int, int]] = []
    book = Book(count=lambda rollout: counted.append((rollout.ordinal, rollout.attempt)))
    intake = Intake(book=book, evaluations={}, policies=cast("Any", None))
    for ordinal, attempt in [(2, 0), (0, 1)]:
        intake.take(make_rollout(ordinal, 0, attempt=attempt))
    assert not book.plays and not intake.has_begun
    book.abandon(intake.noted, reason="cancelled")
    assert [(item.ordinal, item.reason, item.attempts) for item in book.pending] == [
        (0, "cancelled", 2),
        (1, "cancelled", 0),
        (2, "cancelled", 1),
    ]
    assert len(archived(book)) == 2 and book.frontier == Frontier(resolved_below=3)
    assert counted == [(2, 0), (0, 1)], "they count as all others do"


async def test_the_plays_that_a_predecessor_began_are_drawn_beside_the_event_loop() -> None:
    """The stream and the takeover have tasks drawn before the plays that they open."""
    drawn: list[int] = []

    async def draw(ordinals: Iterable[int]) -> None:
        drawn.extend(ordinals)

    def opened(ordinal: int, step: int) -> Play:
        assert ordinal in drawn
        return make_play(ordinal)

    book = Book()
    book.restore(step=1, frontier=Frontier(resolved_below=1))
    policies = SimpleNamespace(replica_at=lambda url: "x", suspect=lambda worker_id: None)
    intake = Intake(book=book, evaluations={}, policies=cast("Any", policies))
    intake.begin(opened, has_predecessor=True, draw=draw)
    rollouts = [make_rollout(ordinal, 0, group_size=2) for ordinal in (2, 0, 1, 2)]
    await intake.prepare(rollouts)
    assert drawn == [1, 2], "0 is resolved"
    for rollout in rollouts:
        intake.take(rollout)
    groups = [
        PlayingGroup(purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=ordinal, attempt=0, members=[1]) for ordinal in (1, 3)
    ]
    await intake.take_over(cast("Any", ReadStream()), {"a": groups})
    assert drawn == [1, 2, 3] and sorted(book.plays) == [1, 2, 3]
