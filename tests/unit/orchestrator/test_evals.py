import time
from dataclasses import replace

import pytest

from millrace.config.load import validate_document
from millrace.errors import InvalidSpecError, Violation
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, PlayingGroup
from millrace.orchestrator.play.book import Book
from millrace.orchestrator.play.env_servers import OpenedEnv
from millrace.orchestrator.play.evals import Evaluation, Evaluator
from millrace.orchestrator.play.intake import Intake
from millrace.orchestrator.play.play import Play
from millrace.orchestrator.play.player import Player, RunIdentity
from millrace.orchestrator.play.routing import ReadyReplica, Router
from millrace.orchestrator.play.settings import PLAY_SLACK_S, of_training, plays_of_training
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus
from millrace_testing.orchestrator.builders import make_play, make_rollout

ENVS = {"batch_size": 4, "rollouts_per_example": 2, "env": [{"id": "reverse-text"}]}
CONFIG = validate_document(
    {"model": {"name": "m"}, "orchestrator": ENVS | {"eval": {"num_examples": 1, "rollouts_per_example": 2}}}
).orchestrator
RUN = RunIdentity(uid="r1", epoch=1, generation=1)


class OneReplica:
    desired = None

    def __init__(self) -> None:
        self.suspected: list[str] = []

    def replica_at(self, http_url: str) -> str:
        return "inference-0"

    def known(self) -> set[str]:
        return {"inference-0"}

    def suspect(self, worker_id: str) -> None:
        self.suspected.append(worker_id)

    def ready(self) -> list[ReadyReplica]:
        return [ReadyReplica(worker_id="inference-0", http_url="http://x/v1", model="policy", version=0)]


class ReadStream:
    """A stream that has been read to its end."""

    def __init__(self) -> None:
        self.newest = "7-1"
        self.num_catch_ups = 0

    async def catch_up(self) -> None:
        self.num_catch_ups += 1


class HastyEnvs:
    """An env-server whose rollouts arrive before the answer to PlayGroup, the first attempt's failed."""

    def __init__(self) -> None:
        spec = EnvSpec(name="reverse-text", id="reverse-text", args_json="{}")
        opened = OpenedEnv(spec=spec, num_train=4, train_digest="d", num_eval=1, requires_group=False)
        self.envs = {"reverse-text": opened}
        self.attempts: list[int] = []
        self.deliver = None

    def alive(self) -> list[str]:
        return ["env-server-0"]

    def servers_with(self, env: str) -> list[str]:
        return ["env-server-0"]

    async def play(self, worker_id: str, request: PlayGroupRequest) -> bool:
        self.attempts.append(request.attempt)
        status = RolloutStatus.ENV_ERROR if request.attempt == 0 else RolloutStatus.OK
        for member in request.members:
            rollout = make_rollout(
                request.ordinal, member, attempt=request.attempt, group_size=request.group_size, status=status
            )
            self.deliver(rollout, request)
        return True


def player_of(envs: HastyEnvs) -> Player:
    return Player(run=RUN, envs=envs, policies=OneReplica(), stream=ReadStream(), router=Router())


def training_book(*, scored_whole: bool = False) -> tuple[Book, Play]:
    """Return a book with one group of training, as the run's config has it played."""
    book = Book()
    play = book.plays[0] = make_play(settings=plays_of_training(CONFIG, CONFIG.env[0]), scored_whole=scored_whole)
    return book, play


@pytest.mark.timeout(20)
async def test_an_evaluation_whose_failures_outrun_the_answer_is_played_again() -> None:
    envs = HastyEnvs()
    open_: dict[str, Evaluation] = {}
    evaluator = Evaluator(settings=of_training(CONFIG), epoch=1, envs=envs, player=player_of(envs), evaluations=open_)

    def deliver(rollout: Rollout, request) -> None:
        fields = {name: getattr(rollout, name) for name in rollout.__slots__}
        open_[request.eval_id].add(Rollout(**fields | {"purpose": Purpose.EVAL, "eval_id": request.eval_id}))

    envs.deliver = deliver
    report, good = await evaluator.evaluate("reverse-text", step=0, min_version=0)
    assert envs.attempts == [0, 1] and len(good) == 2 and report.num_failed == 0


async def test_a_group_whose_failures_outrun_the_answer_is_not_taken_for_placed() -> None:
    envs, (book, group) = HastyEnvs(), training_book()

    def deliver(rollout: Rollout, request) -> None:
        assert request.purpose == rollout_pb2.PURPOSE_TRAIN
        book.add(rollout)

    envs.deliver = deliver
    player = player_of(envs)
    assert await player.place(group, book.plays.values())
    assert (group.attempt, group.env_server) == (1, ""), "attempt 1 is placed by nobody yet"
    assert await player.place(group, book.plays.values())
    assert book.whole == [group]


class CountedEnvs(HastyEnvs):
    """Env-servers that say yes until they are full, and play nothing by themselves; they take only whole groups."""

    def __init__(self, *, room: dict[str, int], num_eval: int = 1, requires_group: bool = False) -> None:
        super().__init__()
        opened = self.envs["reverse-text"]
        self.envs = {"reverse-text": replace(opened, num_eval=num_eval, requires_group=requires_group)}
        self.room, self.requires_group = room, requires_group
        self.placed: list[tuple[str, int, int]] = []
        self.loses_answers = False

    def alive(self) -> list[str]:
        return list(self.room)

    def servers_with(self, env: str) -> list[str]:
        return list(self.room)

    async def play(self, worker_id: str, request: PlayGroupRequest) -> bool:
        if self.requires_group and len(request.members) != request.group_size:
            raise InvalidSpecError([Violation(field="members", message="all must be played")], reason="REQUEST_INVALID")
        if not self.room[worker_id]:
            return False
        self.room[worker_id] -= 1
        self.placed.append((worker_id, request.ordinal, request.attempt))
        return not self.loses_answers


class Evaluated:
    """One evaluation, the player that places its tasks, and the intake that brings it rollouts."""

    def __init__(self, envs: HastyEnvs, num_examples: int = 1) -> None:
        settings = of_training(CONFIG)
        assert settings is not None
        settings = replace(settings, envs=tuple(replace(env, num_examples=num_examples) for env in settings.envs))
        evaluations: dict[str, Evaluation] = {}
        self.player = player_of(envs)
        evaluator = Evaluator(settings=settings, epoch=1, envs=envs, player=self.player, evaluations=evaluations)
        self.intake = Intake(book=Book(), evaluations=evaluations, policies=OneReplica())
        self.current = evaluator.begin("reverse-text", step=0, min_version=0)
        self.plays = list(self.current.plays.values())
        self.intake.begin(None, has_predecessor=True)

    async def place(self) -> None:
        await self.player.place_open(self.plays)


def play_of(current, member: int, env_server: str, *, attempt: int = 0, reward: float = 0.0) -> Rollout:
    made = make_rollout(0, member, attempt=attempt, group_size=2, env_server=env_server, reward=reward)
    return replace(made, purpose=Purpose.EVAL, eval_id=current.eval_id)


async def test_a_task_goes_to_an_env_server_that_has_room() -> None:
    envs = CountedEnvs(room={"full": 0, "free": 9}, num_eval=4)
    await Evaluated(envs, num_examples=4).place()
    assert envs.placed == [("free", ordinal, 0) for ordinal in range(4)]


def test_an_environment_is_played_with_its_own_sampling() -> None:
    eval_config = {"env": [{"id": "reverse-text", "sampling": {"temperature": 0.25}}], "sampling": {"top_p": 0.5}}
    settings = of_training(validate_document({"orchestrator": ENVS | {"eval": eval_config}}).orchestrator)
    envs = CountedEnvs(room={"a": 9})
    evaluator = Evaluator(settings=settings, epoch=1, envs=envs, player=player_of(envs), evaluations={})
    plays = evaluator.begin("reverse-text", step=0, min_version=0).plays.values()
    assert [(each.settings.sampling.temperature, each.settings.sampling.top_p) for each in plays] == [(0.25, 0.5)]


def test_each_environment_has_its_own_counts_and_interval() -> None:
    document = {
        "orchestrator": {
            "rollouts_per_example": 2,
            "env": [{"id": "a"}],
            "eval": {
                "interval": 4,
                "num_examples": 3,
                "env": [{"id": "a"}, {"id": "b", "num_examples": -1, "group_size": 8, "interval": 6}],
            },
        }
    }
    settings = of_training(validate_document(document).orchestrator)
    assert settings is not None
    counts = [(env.name, env.num_examples, env.rollouts_per_example, env.interval) for env in settings.envs]
    assert counts == [("a", 3, 1, 4), ("b", -1, 8, 6)]
    envs = CountedEnvs(room={})
    evaluator = Evaluator(settings=settings, epoch=1, envs=envs, player=player_of(envs), evaluations={})
    assert evaluator.interval == 2

    def due(step: int) -> list[str]:
        return list(evaluator.due(step, last=last))

    last = {"a": 0, "b": 0}
    assert [due(step) for step in (0, 2, 4, 6)] == [[], [], ["a"], ["a", "b"]]
    last = {"a": 8, "b": 6}
    assert [due(step) for step in (8, 10, 12, 14)] == [[], [], ["a", "b"], ["a", "b"]]
    last = {"a": 12, "b": 6}
    assert due(14) == ["b"], "its step 12 passed while nobody drove the run: it is made up for"
    last = {"a": 4, "b": 6}
    assert evaluator.due(18, last=last) == {"a": [8, 12, 16], "b": [12]}, "what is skipped has names"


async def test_tasks_begin_at_env_servers_in_turn_and_stop_when_all_are_full() -> None:
    envs = CountedEnvs(room={"a": 2, "b": 1}, num_eval=4)
    evaluated = Evaluated(envs, num_examples=4)
    await evaluated.place()
    assert envs.placed == [("a", 0, 0), ("b", 1, 0), ("a", 2, 0)]
    assert [task.env_server for task in evaluated.plays] == ["a", "b", "a", ""]


async def test_a_task_that_is_scored_whole_begins_anew_when_it_was_lost_in_part() -> None:
    envs = CountedEnvs(room={"a": 9, "b": 9}, requires_group=True)
    evaluated = Evaluated(envs)
    current = evaluated.current
    await evaluated.place()
    current.add(play_of(current, 0, "a", reward=1.0))
    del envs.room["a"]
    await evaluated.place()
    assert envs.placed == [("a", 0, 0), ("b", 0, 1)] and not current.good()
    current.add(play_of(current, 1, "a", reward=1.0))
    assert not current.good(), "what the lost play still brings was compared with other members"
    for member in (0, 1):
        current.add(play_of(current, member, "b", attempt=1))
    assert [(rollout.env_server, rollout.attempt) for rollout in current.good()] == [("b", 1)] * 2


@pytest.mark.parametrize("dies", [False, True])
async def test_a_whole_task_whose_answer_was_lost_is_left_to_who_plays_it(dies: bool) -> None:
    envs = CountedEnvs(room={"a": 1}, requires_group=True)
    envs.loses_answers = True
    evaluated = Evaluated(envs)
    current = evaluated.current
    await evaluated.place()
    current.add(play_of(current, 0, "a"))
    envs.loses_answers = False
    envs.room = {"b": 9} if dies else {"a": 9, "b": 9}
    await evaluated.place()
    await evaluated.place()
    if dies:
        assert envs.placed == [("a", 0, 0), ("b", 0, 1)] and not current.good()
    else:
        assert envs.placed == [("a", 0, 0)] and current.plays[0].env_server == "a"


@pytest.mark.parametrize("dies", [False, True])
async def test_a_whole_training_group_whose_answer_was_lost_is_left_to_who_plays_it(dies: bool) -> None:
    envs = CountedEnvs(room={"a": 1}, requires_group=True)
    envs.loses_answers = True
    (book, group), player = training_book(scored_whole=True), player_of(envs)
    assert not await player.place(group, book.plays.values())
    book.add(make_rollout(0, 0, group_size=2, env_server="a"))
    envs.loses_answers = False
    envs.room = {"b": 9} if dies else {"a": 9, "b": 9}
    assert await player.place(group, book.plays.values())
    assert (group.env_server, group.attempt) == ("a", 0)
    assert group.deadline < time.monotonic() + PLAY_SLACK_S + 1 < time.monotonic() + group.settings.timeout_s
    assert player.lost(book.plays.values()) == ([group] if dies else []), (
        "the loop plays it anew if nobody plays it any more"
    )
    assert envs.placed == [("a", 0, 0)]
    if not dies:
        book.add(make_rollout(0, 1, group_size=2, env_server="a"))
        assert book.whole == [group]


async def test_a_whole_group_that_two_play_belongs_to_the_one_that_brought_the_first_member() -> None:
    envs = CountedEnvs(room={"a": 1, "b": 1}, requires_group=True)
    (book, group), player = training_book(scored_whole=True), player_of(envs)
    ask = envs.play

    async def play(worker_id: str, request: PlayGroupRequest) -> bool:
        took = await ask(worker_id, request)
        if worker_id == "b":  # while it is asked, the play whose answer was lost brings a member
            book.add(make_rollout(0, 0, group_size=2, env_server="a"))
        return took and worker_id == "b"

    envs.play = play
    assert await player.place(group, book.plays.values())
    assert [server for server, *_ in envs.placed] == ["a", "b"] and group.env_server == "a"


async def test_a_whole_group_is_lost_with_the_one_that_brought_its_first_member() -> None:
    envs = CountedEnvs(room={"b": 9}, requires_group=True)
    (book, group), player = training_book(scored_whole=True), player_of(envs)
    assert await player.place(group, book.plays.values())
    assert group.env_server == "b" and not player.lost(book.plays.values())
    book.add(make_rollout(0, 0, group_size=2, env_server="a"))  # of an earlier play, which counted as lost
    assert player.lost(book.plays.values()) == [group], "what b brings is of another play"


async def test_a_takeover_keeps_a_whole_task_only_if_its_play_goes_on() -> None:
    envs = CountedEnvs(room={"a": 9}, requires_group=True)
    evaluated = Evaluated(envs)
    intake, current, [task] = evaluated.intake, evaluated.current, evaluated.plays
    intake.take(play_of(current, 0, "a"))
    playing = PlayingGroup(
        purpose=rollout_pb2.PURPOSE_EVAL, eval_id=current.eval_id, ordinal=0, attempt=1, members=[0, 1]
    )
    await intake.take_over(ReadStream(), {"a": [playing]})
    assert (task.attempt, task.missing, task.env_server) == (1, [0, 1], "a")
    for member in (0, 1):
        intake.take(play_of(current, member, "a", attempt=1))
    intake.take(play_of(current, 0, "a", attempt=2))
    assert not task.missing and {rollout.attempt for rollout in task.members.values()} == {1}, "what is whole stays"
