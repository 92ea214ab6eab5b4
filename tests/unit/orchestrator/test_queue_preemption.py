"""Which runs pause for another one, by examples and by a model of the queue in which they go on later."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.orchestrator.queue.order import (
    AGE_S,
    HeldRun,
    QueuedRun,
    QueuePlace,
    WorkerPool,
    choose_victims,
    place_runs,
)


def held(uid: str, priority: int = 0, num_replicas: int = 1, **more) -> HeldRun:
    return HeldRun(uid=uid, priority=priority, num_replicas=num_replicas, **more)


@pytest.mark.parametrize(
    ("runs", "num_trainers", "num_replicas", "victims"),
    [
        ([held("1", 2), held("2", 1), held("3", 1)], 1, 1, ("3",)),
        ([held("1", 1), held("2", 2)], 1, 1, ("1",)),
        ([held("1", 5), held("2", 6)], 1, 1, ()),
        ([held("1"), held("2")], 1, 3, ()),
        ([held("1"), held("2")], 1, 2, ("2", "1")),
        # The first that is chosen is not needed once another one is.
        ([held("1", 1, 3), held("2", 0, 1)], 1, 3, ("1",)),
        ([held("1"), held("2", is_leaving=True)], 1, 1, ()),
        ([held("1"), held("2", is_leaving=True)], 1, 2, ("1",)),
        ([held("1", num_replicas=0)], 0, 1, ()),
        ([held("1")], 0, 0, ()),
    ],
)
def test_the_lowest_and_newest_pause_and_only_if_that_is_enough(
    runs: list[HeldRun], num_trainers: int, num_replicas: int, victims: tuple[str, ...]
) -> None:
    found = choose_victims(runs, priority=5, num_trainers=num_trainers, num_replicas=num_replicas)
    assert found == victims


@dataclass(kw_only=True)
class Job:
    uid: str
    arrives: float
    lasts: float
    priority: int
    num_replicas: int
    is_preemptible: bool
    ran: float = 0.0
    since: float = 0.0
    """When it began to wait."""
    protected: int = 0
    """Its priority with what it had gained by waiting when it began."""
    num_preempted: int = 0


@dataclass(kw_only=True)
class Cluster:
    """Workers and runs; a run that pauses keeps its workers for `PAUSE_S`, and goes on where it was."""

    PAUSE_S = 7.0
    pool: WorkerPool
    jobs: dict[str, Job]
    now: float = 0.0
    began: dict[str, float] = field(default_factory=dict)
    holds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    pausing: dict[str, float] = field(default_factory=dict)
    preempted_by: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def is_over(self, job: Job) -> bool:
        return job.uid not in self.holds and job.ran >= job.lasts

    def waiting(self) -> list[Job]:
        here = [job for job in self.jobs.values() if job.arrives <= self.now and job.uid not in self.holds]
        return [job for job in here if not self.is_over(job)]

    def place(self) -> list[QueuePlace]:
        taken = {worker for workers in self.holds.values() for worker in workers}
        return place_runs(
            [
                QueuedRun(
                    uid=job.uid,
                    priority=job.priority,
                    since=job.since,
                    num_replicas=job.num_replicas,
                    trainers=[each for each in self.pool.trainers if each not in taken],
                    replicas=[each for each in self.pool.replicas if each not in taken],
                )
                for job in self.waiting()
            ],
            groups={},
            used={},
            pool=self.pool,
            now=self.now,
        )

    def look(self, *, is_killed: bool) -> None:
        places = self.place()
        if is_killed:
            # Before any worker heard of its claims, or any run that it shall pause; the next look finds the same.
            places = self.place()
        for place in places:
            if place.workers:
                job = self.jobs[place.uid]
                job.protected = job.priority + int((self.now - job.since) / AGE_S)
                self.holds[place.uid], self.began[place.uid] = place.workers, self.now
        self.preempt(next((place for place in places if place.is_head), None))

    def preempt(self, head: QueuePlace | None) -> None:
        if head is None:
            return
        wants = self.jobs[head.uid]
        kept = [len([each for each in head.kept if each in kind]) for kind in (self.pool.trainers, self.pool.replicas)]
        runs = [
            held(uid, self.jobs[uid].protected, len(workers) - 1, is_leaving=uid in self.pausing)
            for uid, workers in self.holds.items()
            if self.jobs[uid].is_preemptible
        ]
        lacks = 1 - kept[0], wants.num_replicas - kept[1]
        victims = choose_victims(runs, priority=wants.priority, num_trainers=lacks[0], num_replicas=lacks[1])
        for uid in victims:
            assert self.jobs[uid].priority < wants.priority and self.jobs[uid].is_preemptible
            assert head.uid not in self.preempted_by[uid], "nobody preempts the run that preempted it"
            self.pausing[uid] = self.now + self.PAUSE_S
            self.preempted_by[head.uid].add(uid)
            self.jobs[uid].num_preempted += 1
        freed = [self.holds[uid] for uid in self.pausing]
        if victims:
            assert len(freed) >= lacks[0] and sum(len(each) - 1 for each in freed) >= lacks[1], "nobody pauses in vain"

    def run(self, kills: frozenset[int], *, most_looks: int = 2000) -> None:
        for number in range(most_looks):
            self.look(is_killed=number in kills)
            ends = [self.began[uid] + self.jobs[uid].lasts - self.jobs[uid].ran for uid in self.holds]
            arrivals = [job.arrives for job in self.jobs.values() if job.arrives > self.now]
            coming = [*ends, *arrivals, *self.pausing.values()]
            if not coming:
                return
            # A run that ends while it pauses has ended.
            self.now = max(self.now, min(coming))
            for uid, workers in list(self.holds.items()):
                job = self.jobs[uid]
                ran = job.ran + self.now - self.began[uid]
                if ran >= job.lasts or self.pausing.get(uid, self.now + 1) <= self.now:
                    assert workers
                    job.ran, job.since = ran, self.now
                    del self.holds[uid]
                    self.pausing.pop(uid, None)
        raise AssertionError("it never ends")


@st.composite
def clusters(draw) -> tuple[Cluster, frozenset[int]]:
    num_replicas = draw(st.integers(1, 4))
    pool = WorkerPool(
        trainers={f"t{n}": 1 for n in range(draw(st.integers(1, 3)))},
        replicas={f"r{n}": 1 for n in range(num_replicas)},
    )
    jobs = [
        Job(
            uid=f"{number:03}",
            arrives=(at := float(draw(st.integers(0, 5000)))),
            since=at,
            lasts=float(draw(st.integers(1, 3000))),
            priority=draw(st.integers(0, 3)),
            num_replicas=draw(st.integers(1, num_replicas)),
            is_preemptible=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 12)))
    ]
    cluster = Cluster(pool=pool, jobs={job.uid: job for job in jobs})
    return cluster, frozenset(draw(st.sets(st.integers(0, 60), max_size=10)))


@settings(max_examples=80, deadline=None)
@given(clusters())
def test_every_run_ends_and_none_is_preempted_more_often_than_there_are_higher_ones(
    drawn: tuple[Cluster, frozenset[int]],
) -> None:
    cluster, kills = drawn
    cluster.run(kills)
    for job in cluster.jobs.values():
        assert job.ran == pytest.approx(job.lasts), "nothing is lost or done twice"
        higher = [other for other in cluster.jobs.values() if other.priority > job.priority]
        assert job.num_preempted <= sum(1 + other.num_preempted for other in higher)


def test_a_run_that_waited_long_keeps_what_it_got() -> None:
    """The higher ones arrive all the time: without the protection the low one would begin and pause for ever."""
    low = Job(uid="a", arrives=0.0, lasts=500.0, priority=0, num_replicas=1, is_preemptible=True)
    high = [
        Job(uid=f"h{n:03}", arrives=90.0 * n, since=90.0 * n, lasts=100.0, priority=1, num_replicas=1,
            is_preemptible=False)
        for n in range(60)
    ]  # fmt: skip
    cluster = Cluster(
        pool=WorkerPool(trainers={"t": 1}, replicas={"r": 1}), jobs={job.uid: job for job in (low, *high)}
    )
    cluster.run(frozenset())
    assert low.num_preempted == 0 and cluster.began["a"] >= AGE_S
    assert sum(other.arrives > cluster.began["a"] + 500.0 for other in high) > 20, "others still came when it had ended"
