"""The order of the queue, by examples and by a model that plays runs on workers for a long time."""

from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import InvalidSpecError
from millrace.orchestrator.queue.groups import parse_groups
from millrace.orchestrator.queue.order import (
    AGE_S,
    GroupUse,
    QueuedRun,
    QueueGroup,
    QueuePlace,
    WaitReason,
    WorkerPool,
    least_accelerators,
    place_runs,
)

POOL = WorkerPool(trainers={"t1": 1, "t2": 1}, replicas={"r1": 1, "r2": 1, "r3": 1})


def waits(uid: str, **fields) -> QueuedRun:
    """A run for which every worker of `POOL` is free, unless told otherwise."""
    return QueuedRun(uid=uid, **{"trainers": ("t1", "t2"), "replicas": ("r1", "r2", "r3"), **fields})


def placed(*waiting: QueuedRun, now: float = 0.0, groups=None, used=None, pool: WorkerPool = POOL) -> list[QueuePlace]:
    return place_runs(waiting, groups=groups or {}, used=used or {}, pool=pool, now=now)


def who(places: list[QueuePlace]) -> list[str]:
    return [each.uid for each in places]


def reasons(places: list[QueuePlace]) -> dict[str, WaitReason | None]:
    return {each.uid: each.reason for each in places}


def test_without_any_key_those_that_came_first_get_the_trainers() -> None:
    places = placed(*(waits(uid, replicas=()) for uid in "312"))
    assert [(each.uid, each.workers) for each in places] == [("1", ("t1",)), ("2", ("t2",)), ("3", ())]
    assert reasons(places)["3"] is WaitReason.TRAINER
    assert [each.position for each in places] == [1, 2, 3]


def test_a_run_whose_claim_failed_comes_after_those_without_a_failed_try() -> None:
    assert who(placed(waits("1", tried=20.0), waits("2", tried=10.0), waits("3"))) == ["3", "2", "1"]


def test_priority_goes_before_arrival_and_an_interrupted_run_before_both() -> None:
    assert who(placed(waits("1"), waits("2", priority=5), waits("3", is_interrupted=True))) == ["3", "2", "1"]


def test_an_interrupted_run_whose_claims_fail_leaves_its_precedence_to_the_others() -> None:
    fails = waits("1", is_interrupted=True, tried=20.0)
    assert who(placed(fails, waits("2"), waits("3", is_interrupted=True))) == ["3", "2", "1"]


def test_small_runs_of_a_group_leave_a_large_one_the_room_that_it_waits_for() -> None:
    groups, used = {"a": QueueGroup(quota=4)}, {"a": GroupUse(held=2)}
    large, small, others = waits("1", group="a", num_replicas=3), waits("2", group="a"), waits("3", group="b")
    places = placed(large, small, others, groups=groups, used=used)
    assert reasons(places) == {"1": WaitReason.QUOTA, "2": WaitReason.QUOTA, "3": None}
    too_large = waits("1", group="a", num_replicas=3)
    places = placed(too_large, small, groups={"a": QueueGroup(quota=3)}, used={"a": GroupUse(held=1)})
    assert reasons(places) == {"1": WaitReason.QUOTA, "2": None}, "it never fits: the quota was lowered since"


def test_a_priority_grows_with_waiting_up_to_the_highest_that_waits() -> None:
    old = waits("9", priority=0, since=0.0)
    new = waits("1", priority=2, since=2 * AGE_S)
    assert who(placed(old, new, now=2 * AGE_S - 1)) == ["1", "9"]
    last = placed(old, new, now=50 * AGE_S)
    assert {each.uid: each.priority for each in last} == {"9": 2, "1": 2}, "and not beyond"


def test_of_equal_priority_the_group_goes_first_that_used_least_by_its_weight() -> None:
    groups = {"a": QueueGroup(weight=2.0), "b": QueueGroup()}
    runs = waits("1", group="b"), waits("2", group="a")
    assert who(placed(*runs, groups=groups, used={"a": GroupUse(seconds=1900), "b": GroupUse(seconds=1000)})) == [
        "2",
        "1",
    ]
    assert who(placed(*runs, groups=groups, used={"a": GroupUse(seconds=2100), "b": GroupUse(seconds=1000)})) == [
        "1",
        "2",
    ]


def test_runs_that_are_claimed_together_are_of_several_groups() -> None:
    places = placed(waits("1", group="a"), waits("2", group="a"), waits("3", group="b"))
    assert [each.uid for each in places if each.workers] == ["1", "3"]


def test_a_gang_is_claimed_whole_or_not_at_all() -> None:
    (whole,) = placed(waits("1", num_replicas=3))
    assert whole.workers == ("t1", "r1", "r2", "r3")
    (part,) = placed(waits("1", num_replicas=3, replicas=("r1", "r2")))
    assert (part.workers, part.reason, part.kept) == ((), WaitReason.REPLICAS, ("t1", "r1", "r2"))
    (other,) = placed(waits("1", num_replicas=2, trainers=()))
    assert (other.workers, other.reason, other.kept) == ((), WaitReason.TRAINER, ("r1", "r2"))


def test_later_runs_get_only_what_the_head_does_not_need() -> None:
    free = {"trainers": ("t1", "t2"), "replicas": ("r1", "r2")}
    places = placed(
        waits("1", num_replicas=3, **free),
        waits("2", num_replicas=1, **free),
        waits("3", **free),
        waits("4", **free),
    )
    assert reasons(places) == {
        "1": WaitReason.REPLICAS,
        "2": WaitReason.KEPT,
        "3": WaitReason.KEPT,
        "4": WaitReason.KEPT,
    }, "with its trainer a run would take the next replica that is free, which the head needs"
    assert [each.uid for each in places if each.is_head] == ["1"]
    waits_for_a_trainer = waits("1", num_replicas=2, trainers=())
    places = placed(waits_for_a_trainer, waits("2", **free), waits("3", num_replicas=1))
    assert reasons(places) == {"1": WaitReason.TRAINER, "2": WaitReason.KEPT, "3": None}
    assert places[2].workers == ("t1", "r3"), "the replica that the head does not need"


def test_a_run_without_a_need_takes_a_replica_that_is_free_before_a_later_gang_does() -> None:
    places = placed(waits("1"), waits("2", num_replicas=3))
    assert [each.workers for each in places] == [("t1", "r1"), ()]
    assert places[1].kept == ("t2", "r2", "r3")
    none_is_free = placed(waits("1", replicas=()), waits("2", num_replicas=3, replicas=()))
    assert [each.workers for each in none_is_free] == [("t1",), ()], "it came before: the next one is its own"


def test_a_run_that_needs_more_than_is_registered_holds_nobody_up() -> None:
    places = placed(waits("1", num_replicas=4), waits("2", num_replicas=3))
    assert reasons(places) == {"1": WaitReason.TOO_LARGE, "2": None}


def test_a_quota_stops_only_its_group_and_keeps_nothing() -> None:
    groups, used = {"a": QueueGroup(quota=3)}, {"a": GroupUse(held=2)}
    places = placed(
        waits("1", group="a", num_replicas=1), waits("2", group="b", num_replicas=3), groups=groups, used=used
    )
    assert reasons(places) == {"1": WaitReason.QUOTA, "2": None}
    (fits,) = placed(waits("1", group="a"), groups=groups, used={"a": GroupUse(held=1)})
    assert fits.workers == ("t1", "r1")


def test_a_quota_chooses_a_trainer_that_fits_and_stops_no_interrupted_run() -> None:
    pool = WorkerPool(trainers={"t1": 8, "t2": 2})
    run, groups = waits("1", group="a"), {"a": QueueGroup(quota=4)}
    assert placed(run, groups=groups, pool=pool)[0].workers == ("t2", "r1")
    goes_on = waits("1", group="a", is_interrupted=True)
    assert placed(goes_on, groups=groups, used={"a": GroupUse(held=4)}, pool=pool)[0].workers == ("t1", "r1")


def test_two_claims_of_a_group_do_not_exceed_its_quota_together() -> None:
    places = placed(waits("1", group="a"), waits("2", group="a"), groups={"a": QueueGroup(quota=3)})
    assert reasons(places) == {"1": None, "2": WaitReason.QUOTA}


@pytest.mark.parametrize(
    ("pool", "num_replicas", "least"),
    [(POOL, 2, 3), (WorkerPool(), 2, 3), (WorkerPool(trainers={"t": 8}, replicas={"r": 4}), 1, 12)],
)
def test_the_least_that_a_run_takes(pool: WorkerPool, num_replicas: int, least: int) -> None:
    assert least_accelerators(pool, num_replicas) == least


def test_groups_are_read_from_the_setting() -> None:
    assert parse_groups("") == {}
    groups = parse_groups(" research:weight=2.5:quota=16, batch")
    assert groups == {"default": QueueGroup(), "research": QueueGroup(weight=2.5, quota=16), "batch": QueueGroup()}
    assert parse_groups("default:quota=4")["default"] == QueueGroup(quota=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:weight=0", "a weight above 0"),
        ("a:quota=0", "a quota of at least 1"),
        ("a:quota=1.5", "a quota of at least 1"),
        ("a:speed=1", "must be such as `research:weight=2:quota=16,batch`"),
        ("A", "must be such as"),
        ("a,,b", "must be such as"),
        ("a,a", "group 'a' is named twice"),
        ("a:weight=1:weight=2", "weight is given twice"),
    ],
)
def test_a_malformed_setting_is_refused_with_its_form(text: str, message: str) -> None:
    with pytest.raises(InvalidSpecError) as raised:
        parse_groups(text)
    assert message in str(raised.value) and "MILLRACE_QUEUE_GROUPS" in str(raised.value)


# A model: runs arrive, hold what they get for as long as they last, and end.


@dataclass(kw_only=True)
class Job:
    uid: str
    arrives: float
    lasts: float
    group: str = "default"
    priority: int = 0
    num_replicas: int = 0


@dataclass(kw_only=True)
class Cluster:
    """Workers, runs that hold some of them, and what was used."""

    pool: WorkerPool
    groups: dict[str, QueueGroup]
    jobs: list[Job]
    now: float = 0.0
    began: dict[str, float] = field(default_factory=dict)
    holds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    is_refilled: bool = False
    """For every run that begins, one like it joins the queue."""

    def waiting(self) -> list[Job]:
        return [job for job in self.jobs if job.arrives <= self.now and job.uid not in self.began]

    def accelerators(self, uid: str) -> int:
        return sum({**self.pool.trainers, **self.pool.replicas}[each] for each in self.holds[uid])

    def look(self) -> list[QueuePlace]:
        """One look of the scheduler, which remembers nothing of the one before: it may have been killed in between."""
        jobs = {job.uid: job for job in self.jobs}
        taken = {worker for workers in self.holds.values() for worker in workers}
        for uid, workers in self.holds.items():
            # As soon as there is one, a run that began without a replica has its first.
            first = [each for each in self.pool.replicas if each not in taken]
            if len(workers) == 1 and first:
                self.holds[uid] = (*workers, first[0])
                taken.add(first[0])
        used = defaultdict(lambda: [0.0, 0])
        for group, seconds in self.seconds.items():
            used[group][0] = seconds
        for uid in self.holds:
            lacks = len(self.holds[uid]) == 1  # the room for its first replica is its own
            used[jobs[uid].group][1] += self.accelerators(uid) + lacks * min(self.pool.replicas.values(), default=1)
        places = place_runs(
            [
                QueuedRun(
                    uid=job.uid,
                    group=job.group,
                    priority=job.priority,
                    since=job.arrives,
                    num_replicas=job.num_replicas,
                    trainers=[each for each in self.pool.trainers if each not in taken],
                    replicas=[each for each in self.pool.replicas if each not in taken],
                )
                for job in self.waiting()
            ],
            groups=self.groups,
            used={group: GroupUse(seconds=seconds, held=held) for group, (seconds, held) in used.items()},
            pool=self.pool,
            now=self.now,
        )
        self.require_sound(places, taken)
        for place in places:
            if place.workers:
                self.holds[place.uid], self.began[place.uid] = place.workers, self.now
                if self.is_refilled:
                    self.jobs.append(replace(jobs[place.uid], uid=f"{len(self.jobs):05}"))
        return places

    def require_sound(self, places: list[QueuePlace], taken: set[str]) -> None:
        """Every waiting run has one place; a gang is whole; nothing is given twice, or beyond a quota."""
        jobs = {job.uid: job for job in self.jobs}
        assert sorted(who(places)) == sorted(job.uid for job in self.waiting())
        given = [worker for place in places for worker in place.workers]
        assert len(given) == len(set(given)) and not taken & set(given)
        for place in places:
            assert (place.reason is None) == bool(place.workers)
            if place.workers:
                trainer, *replicas = place.workers
                assert trainer in self.pool.trainers
                assert len(replicas) in {jobs[place.uid].num_replicas, max(1, jobs[place.uid].num_replicas)}
                assert all(each in self.pool.replicas for each in replicas)
        for name, group in self.groups.items():
            before = sum(self.accelerators(uid) for uid in self.holds if jobs[uid].group == name)
            sizes = {**self.pool.trainers, **self.pool.replicas}
            added = sum(sizes[worker] for p in places if p.group == name for worker in p.workers)
            assert not added or group.quota is None or before + added <= group.quota
        heads = [place for place in places if place.kept]
        assert len(heads) <= 1
        for head in heads:
            assert not set(head.kept) & set(given), "what is kept for the head goes to nobody"
            after = [place for place in places[head.position :] if place.workers and jobs[head.uid].num_replicas]
            assert all(len(place.workers) > 1 for place in after), "nobody passes it who then takes its next replica"

    def run(self, until: float, *, kills: frozenset[int] = frozenset()) -> None:
        """Play until a time. At the looks of these numbers the scheduler dies before any worker hears of its claims."""
        number = 0
        while True:
            number += 1
            before = dict(self.holds), dict(self.began)
            self.look()
            if number in kills:
                self.holds, self.began = before
                self.look()
            jobs = {job.uid: job for job in self.jobs}
            ends = [self.began[uid] + jobs[uid].lasts for uid in self.holds]
            arrivals = [job.arrives for job in self.jobs if job.arrives > self.now]
            following = min([*ends, *arrivals, self.now + AGE_S], default=until)
            if following > until or not (ends or arrivals or self.waiting()):
                return
            for uid in self.holds:
                self.seconds[jobs[uid].group] += self.accelerators(uid) * (following - self.now)
            self.now = following
            for uid in [uid for uid in self.holds if self.began[uid] + jobs[uid].lasts <= self.now]:
                del self.holds[uid]


@st.composite
def clusters(draw) -> tuple[Cluster, frozenset[int]]:
    sizes = st.integers(1, 4)
    trainers = {f"t{n}": draw(sizes) for n in range(draw(st.integers(1, 3)))}
    replicas = {f"r{n}": draw(sizes) for n in range(draw(st.integers(0, 4)))}
    pool = WorkerPool(trainers=trainers, replicas=replicas)
    # A quota that no run of the group fits into is refused at submission.
    largest = max(trainers.values()) + sum(replicas.values())
    quotas = st.none() | st.integers(largest + 1, 2 * largest + 1)
    weights = st.sampled_from([0.5, 1.0, 3.0])
    groups = {name: QueueGroup(weight=draw(weights), quota=draw(quotas)) for name in ("a", "b", "default")}
    jobs = [
        Job(
            uid=f"{number:03}",
            arrives=draw(st.integers(0, 5000)),
            lasts=draw(st.integers(1, 3000)),
            group=draw(st.sampled_from(sorted(groups))),
            priority=draw(st.integers(-2, 3)),
            num_replicas=draw(st.integers(0, len(replicas))),
        )
        for number in range(draw(st.integers(1, 14)))
    ]
    return Cluster(pool=pool, groups=groups, jobs=jobs), frozenset(draw(st.sets(st.integers(1, 40), max_size=10)))


@settings(max_examples=60, deadline=None)
@given(clusters())
def test_every_run_begins_whole_whenever_the_scheduler_dies(drawn: tuple[Cluster, frozenset[int]]) -> None:
    cluster, kills = drawn
    cluster.run(until=1e7, kills=kills)
    assert sorted(cluster.began) == [job.uid for job in cluster.jobs], "none starves, none is lost"


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)]),
    st.lists(st.integers(100, 400), min_size=3, max_size=6),
)
def test_groups_that_always_wait_get_their_shares(
    num_trainers: int, weights: tuple[float, float], lengths: list[int]
) -> None:
    """Within 10 % over 20,000 s, though the first runs of one group came before those of the other."""
    pool = WorkerPool(
        trainers={f"t{n}": 2 for n in range(num_trainers)}, replicas={f"r{n}": 1 for n in range(num_trainers)}
    )
    jobs = [
        Job(uid=f"{group}{n}", group=group, arrives=0.0, lasts=length, num_replicas=n % 2)
        for group in ("a", "b")
        for n, length in enumerate(lengths)
    ]
    groups = {"a": QueueGroup(weight=weights[0]), "b": QueueGroup(weight=weights[1])}
    cluster = Cluster(pool=pool, groups=groups, jobs=jobs, is_refilled=True)
    cluster.run(until=20_000)
    wanted = weights[0] / sum(weights)
    assert cluster.seconds["a"] / sum(cluster.seconds.values()) == pytest.approx(wanted, rel=0.1)


def test_a_low_priority_begins_though_higher_ones_keep_coming() -> None:
    """The same cluster without aging would never give it a trainer."""
    low = Job(uid="a-low", arrives=0.0, lasts=10.0, priority=0)
    high = [Job(uid=f"high{n:04}", arrives=50.0 * n, lasts=100.0, priority=2) for n in range(60)]
    cluster = Cluster(pool=WorkerPool(trainers={"t": 1}), groups={}, jobs=[*high, low])
    cluster.run(until=2 * AGE_S + 200.0)
    # When it is as high as they are, runs that arrived before go first: what had piled up by then.
    assert cluster.began["a-low"] <= 2 * AGE_S + 100.0
    waiting = [job for job in high if job.arrives < cluster.began["a-low"] and job.uid not in cluster.began]
    assert waiting, "others of higher priority waited at that time"


def test_a_large_gang_begins_though_small_ones_keep_coming() -> None:
    large = Job(uid="large", arrives=10.0, lasts=10.0, num_replicas=3)
    small = [Job(uid=f"small{n:04}", arrives=20.0 * n, lasts=35.0, num_replicas=1) for n in range(40)]
    cluster = Cluster(pool=POOL, groups={}, jobs=[*small, large])
    cluster.run(until=800)
    assert cluster.began["large"] <= 10.0 + 3 * 35.0
