"""What becomes of each rollout that the log holds: its play takes it. What a predecessor left is taken over here."""

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from millrace.internal.v1.play_pb2 import PlayingGroup
from millrace.orchestrator.play.book import Book, RolloutStream
from millrace.orchestrator.play.evals import Evaluation
from millrace.orchestrator.play.play import Arrival, Play, PlayState
from millrace.orchestrator.play.routing import Policies
from millrace.rollouts.routed_experts import RoutedForm
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus
from millrace.rollouts.wire import purpose_from_wire

logger = logging.getLogger(__name__)

MakePlay = Callable[[int, int], Play]
"""From ordinal and planned step to an unplaced play."""
Draw = Callable[[Iterable[int]], Awaitable[None]]
"""Draws the tasks of ordinals whose plays are made next, as far as a function of the user's does that."""
Declared = Callable[[], RoutedForm | None]
"""Returns what the experts look like that replicas record; None where none says so."""


async def draw_nothing(ordinals: Iterable[int]) -> None:
    """Do nothing, because every play has its task without an await."""


# The experts are checked against what replicas say of themselves, so that a batch has only those of the engine's model.
class ExpertsCheck:
    """Takes misfitting experts out of rollouts, which stay in play without them, and counts such rollouts."""

    def __init__(self, declared: Declared) -> None:
        """Make a check against what `declared` returns when a rollout comes in; without that nothing is refused."""
        self._declared = declared
        self._num_refused = 0
        self._problem = ""
        self._is_new = False

    def checked(self, rollout: Rollout) -> Rollout:
        """Return the rollout, without the experts of its samples if those of one misfit.

        Rollouts of evaluations are returned as they are.
        """
        if rollout.purpose is not Purpose.TRAIN or all(each.routed_experts is None for each in rollout.samples):
            return rollout
        if (form := self._declared()) is None:
            return rollout
        for sample in rollout.samples:
            if sample.routed_experts is not None and (problem := form.problem_of(sample.routed_experts)):
                self._num_refused, self._is_new = self._num_refused + 1, True
                self._problem = (
                    f"ordinal {rollout.ordinal}, member {rollout.member}, environment {rollout.env!r} has {problem}, "
                    f"and the engine has {form.top_k} of {form.num_experts} experts in each of {form.num_layers} layers"
                )
                return replace(rollout, samples=tuple(replace(each, routed_experts=None) for each in rollout.samples))
        return rollout

    def report(self) -> str:
        """Return the text of a warning about the rollouts whose experts were refused; "" without any since the last
        call.
        """
        if not self._is_new:
            return ""
        self._is_new = False
        return (
            f"the recorded experts of {self._num_refused} rollouts so far misfit and were left out, so that the "
            f"trainer's routers choose for them; the last: {self._problem}; all replicas of a run serve one model, and "
            "env-servers keep what these answer"
        )


class Intake:
    """Takes every rollout of a run once, in the order of the log."""

    def __init__(
        self,
        *,
        book: Book,
        evaluations: Mapping[str, Evaluation],
        policies: Policies,
        reported: Container[str] = (),
        keeps_evaluated: bool = True,
        experts: ExpertsCheck | None = None,
    ) -> None:
        """Make an intake that only notes rollouts until `begin`.

        `evaluations` are the open ones by id, `reported` the ids of those with a report in the log. With
        `keeps_evaluated` every rollout of an evaluation is archived with the next header. `experts` refuses recorded
        experts that misfit; None refuses none.
        """
        self._book = book
        self._evaluations = evaluations
        self._reported = reported
        self._keeps_evaluated = keeps_evaluated
        self._policies = policies
        self.experts = experts
        """Which recorded experts are refused; None if none are."""
        self._make_play: MakePlay | None = None
        self._draw: Draw = draw_nothing
        self.is_taking_over = False
        """Whether what is read was played for a predecessor; ends with `take_over`."""
        self.has_begun = False
        """The environments are known, so that rollouts find their plays; before, they are only noted."""
        self.noted: list[Rollout] = []

    def begin(self, make_play: MakePlay | None, *, has_predecessor: bool, draw: Draw = draw_nothing) -> None:
        """Put rollouts into their plays from now on, instead of only noting them.

        `make_play` makes plays of training, by ordinal and planned step, that a predecessor began, after `draw` has
        drawn their tasks; None if the run does not train. With `has_predecessor` what is read first was played for one.
        """
        self.has_begun, self._make_play, self._draw = True, make_play, draw
        self.is_taking_over = has_predecessor

    async def prepare(self, rollouts: Iterable[Rollout]) -> None:
        """Draw the tasks of the plays that `take` opens for these rollouts; it comes before `take`."""
        await self._draw_unknown(each.ordinal for each in rollouts if each.purpose is Purpose.TRAIN)

    def take(self, rollout: Rollout) -> None:
        """Give one rollout of the stream to the play of its task: into the book, or into an open evaluation.

        Before `begin` the rollout is only noted. The stream calls this once for every entry.
        """
        if not self.has_begun:
            self.noted.append(rollout)
        elif rollout.purpose is Purpose.TRAIN:
            if self.experts is not None:
                rollout = self.experts.checked(rollout)
            play = self._book.plays.get(rollout.ordinal) or self._of_predecessor(rollout)
            self._prepare(play, rollout)
            self._book.add(rollout)
        else:
            # A rollout read again after its evaluation's report is one that the report counts.
            counts = rollout.eval_id in self._reported
            if (evaluation := self._evaluations.get(rollout.eval_id)) is not None:
                self._prepare(evaluation.plays.get(rollout.ordinal), rollout)
                counts = evaluation.add(rollout) is not Arrival.DUPLICATE
            if self._keeps_evaluated:
                self._book.keep_evaluated(rollout, counts=counts)

    async def take_over(self, stream: RolloutStream, playing: Mapping[str, Sequence[PlayingGroup]]) -> None:
        """Take every rollout that the log holds, then mark the plays that env-servers still work on as placed there.

        `playing` has by env-server the groups that it plays; each env-server first appended what it has finished and
        the log lacks. Plays that none of them works on are left to be placed as the next attempt.
        """
        await stream.catch_up()
        # The stream is at its end: from here on an unknown attempt is a late one, not a predecessor's.
        self.is_taking_over = False
        groups = [group for each in playing.values() for group in each]
        await self._draw_unknown(each.ordinal for each in groups if purpose_from_wire(each.purpose) is Purpose.TRAIN)
        offers = [(self._offered(group), server, group) for server, groups in playing.items() for group in groups]
        # First bring all plays to the attempt that is being played, then place them: two env-servers may offer one
        # group.
        for play, _, group in offers:
            if play is not None:
                play.follow(group.attempt)
        for play, server, group in offers:
            if play is not None and play.is_continued_by(attempt=group.attempt, members=group.members):
                replica = self._policies.replica_at(group.base_url)
                play.place(server, replica=replica, timeout_s=play.settings.timeout_s)
        evaluated = [play for each in self._evaluations.values() for play in each.plays.values() if play.is_open]
        left = [*self._book.open, *evaluated]
        for play in left:
            if play.state is PlayState.UNPLACED:
                play.lose()
        fields = {"open": len(left), "finished": len(self._book.whole)}
        logger.info("rollouts taken over", extra=fields | {"being_played": sum(bool(play.env_server) for play in left)})

    def _prepare(self, play: Play | None, rollout: Rollout) -> None:
        """Prepare a play for a rollout that it is about to take; do nothing without an open play.

        While a predecessor's rollouts are read, the play moves on to the rollout's attempt. If the rollout of the
        current attempt lost its engine, the play's replica is suspected.
        """
        if play is None or not play.is_open:
            return
        if self.is_taking_over:
            play.follow(rollout.attempt)
        if rollout.status == RolloutStatus.ENGINE_LOST and rollout.attempt == play.attempt:
            self._policies.suspect(play.replica)

    def _of_predecessor(self, rollout: Rollout) -> Play | None:
        """Open the play of a rollout that a predecessor asked for, move it to the rollout's attempt, and return it.

        None if the rollout's ordinal is resolved. Also after a takeover: an env-server of a predecessor that did not
        answer may play on, and what it sends must not be generated again. The play then counts as placed there.
        """
        play = self._opened(rollout.ordinal, rollout.planned_step)
        if play is not None:
            play.follow(rollout.attempt)
            if rollout.env_server and not self.is_taking_over:
                # So its other members get a deadline, without which they would be waited for without end.
                play.place(rollout.env_server, replica="", timeout_s=play.settings.timeout_s)
        return play

    def _offered(self, group: PlayingGroup) -> Play | None:
        """Return the play of a group that an env-server reports as being played, opened if need be.

        None if it is resolved or unknown.
        """
        if purpose_from_wire(group.purpose) is Purpose.TRAIN:
            return self._opened(group.ordinal, group.planned_step)
        evaluation = self._evaluations.get(group.eval_id)
        return evaluation.plays.get(group.ordinal) if evaluation is not None else None

    async def _draw_unknown(self, ordinals: Iterable[int]) -> None:
        """Draw the tasks of those of the ordinals whose plays `_opened` would make."""
        if self._make_play is not None:
            book = self._book
            await self._draw(
                sorted({each for each in ordinals if each not in book.plays and not book.is_resolved(each)})
            )

    def _opened(self, ordinal: int, planned_step: int) -> Play | None:
        """Return the play of an ordinal from the book, opened for `planned_step` if the book has none.

        None if the ordinal is resolved, or nothing is trained.
        """
        book = self._book
        if ordinal not in book.plays and self._make_play is not None and not book.is_resolved(ordinal):
            book.plays[ordinal] = self._make_play(ordinal, planned_step)
        return book.plays.get(ordinal)
