"""What a rule of retention gives up, and what it never does."""

import contextlib
import random

import pytest

from millrace.config import RLConfig
from millrace.runlog.catalogue import KeptAs, ObjectKind
from millrace.runlog.names import Names
from millrace.runlog.records.retirement import Retired, Retirement, newest_number, newest_retirement
from millrace.runlog.retention import (
    MOST_PER_PASS,
    Retention,
    RetentionRule,
    RunNeeds,
    added,
    keys_at,
    plan,
    record_retirement,
)
from millrace.storage.local import LocalStore

NAMES = Names("mill", "u1")


def planned(rule: RetentionRule, *, step: int, checkpoints: list[int], used: int | None = None, every: int = 4):
    view = RunNeeds(next_step=step, checkpoints=checkpoints, newest_policy=(0, step), oldest_in_use=used)
    return plan(rule, view, lambda lineage, version: version - version % every)


@pytest.mark.parametrize(
    ("batches", "step", "checkpoints", "below"),
    [
        (None, 100, [10, 20, 30], None),
        (5, 100, [], None),  # the trainer begins with the first batch
        (5, 100, [90], 0),  # it may turn out to be damaged: then the run starts over
        (20, 100, [90], 0),  # the promised steps are replayed from a checkpoint before them
        (5, 100, [80, 90], 80),
        (5, 100, [10, 80, 90, 100], 90),  # any of the newest two may turn out to be damaged
        (40, 100, [10, 50, 80, 90], 50),
        (1, 100, [100], 0),
    ],
)
def test_batches_that_a_checkpoint_or_the_key_needs_stay(batches, step, checkpoints, below):
    found = planned(RetentionRule(batches=batches), step=step, checkpoints=checkpoints)
    assert (found[KeptAs.BATCHES].below if KeptAs.BATCHES in found else None) == below


def test_a_window_that_is_longer_than_the_checkpoints_reach_moves_on_once_they_are_pruned(tmp_path):
    """Else nothing would ever go where `keep_last` checkpoints span fewer steps than `retain_batches`."""
    store, rule = LocalStore(tmp_path), RetentionRule(batches=20)
    retention, view = Retention(store, NAMES, first=0, by="me"), RunNeeds(next_step=50, checkpoints=[40, 45])
    assert retention.run(rule, view) == [] and newest_retirement(store, NAMES) is None, "it is replayed from the start"
    record_retirement(store, NAMES, {KeptAs.CHECKPOINTS: Retired(below=40, why="ckpt.keep_last = 2")}, by="trainer")
    assert retention.run(rule, view) == []
    record = newest_retirement(store, NAMES)
    assert record is not None and record.of(KeptAs.BATCHES).below == 30


@pytest.mark.parametrize(
    ("policies", "checkpoints", "used", "below", "keeps"),
    [
        (3, [90, 95], 100, 88, {0}),  # what a trainer that begins at 90 publishes again
        (3, [98, 99], 100, 96, {0}),  # deltas of the newest three build on 96
        (3, [98, 99], 70, 68, {0}),  # a replica serves 70
        (3, [30, 98, 99], 100, 96, {0, 28, 29, 30}),  # the policy of a kept checkpoint, and what it builds on
        (3, [], 100, None, set()),
    ],
)
def test_policies_that_something_reaches_stay(policies, checkpoints, used, below, keeps):
    found = planned(RetentionRule(policies=policies), step=100, checkpoints=checkpoints, used=used)
    retired = found.get(KeptAs.POLICIES)
    assert (retired.below, retired.keeps) == (below, keeps) if retired else below is None


def test_what_is_retired_never_comes_back_whatever_is_asked_for_and_by_whom(tmp_path):
    store, rng, before = LocalStore(tmp_path), random.Random(3), Retirement(number=0, run_uid="u1")
    for number in range(60):
        kept = rng.choice([KeptAs.BATCHES, KeptAs.POLICIES, KeptAs.CHECKPOINTS])
        below = rng.randrange(40 + number)
        keeps = frozenset(rng.sample(range(below), min(below, 5)))
        record_retirement(store, NAMES, {kept: Retired(below=below, keeps=keeps, why="a key")}, by="me")
        record = newest_retirement(store, NAMES) or before
        assert record.number - before.number in (0, 1)
        assert all(record.of(each).includes(before.of(each)) for each in KeptAs)
        assert Retirement.decode(record.encode(), where="it") == record
        for each in KeptAs:
            gone = {n for n in range(200) if record.of(each).covers({"step": n})}
            was = {n for n in range(200) if before.of(each).covers({"step": n})}
            assert set(added(record.of(each), before.of(each))) == gone - was and was <= gone
        before = record


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 7, 8, 9, 1000])
def test_the_newest_record_is_found_by_bisection(most):
    asked = []
    assert newest_number(lambda number: asked.append(number) or 1 <= number <= most) == most
    assert len(asked) <= 2 * max(1, most.bit_length()) + 2


def committed(store: LocalStore, steps: range) -> None:
    for step in steps:
        base = NAMES.batch_data(step, 1, "ab")
        store.put(f"{base}chunk-00000.pb", b"c")
        store.put(f"{NAMES.rollout_data(step, 1, 'ab')}rollouts.pb.zst", b"r")
        store.put(NAMES.token_log(step, 0), b"t")
        store.put(NAMES.batch_header(step), b"h")


def test_only_objects_of_the_class_go_and_what_dead_writers_left_goes_with_them(tmp_path):
    store = LocalStore(tmp_path)
    committed(store, range(6))
    store.put(f"{NAMES.batch_data(2, 1, 'dead')}chunk-00003.pb", b"c")
    Retention(store, NAMES, first=0, by="me").run(RetentionRule(batches=2), RunNeeds(next_step=6, checkpoints=[3, 4]))
    own = {info.key.removeprefix(NAMES.root) for info in store.list(NAMES.root)}
    assert {key for key in own if key[:7] in ("batches", "rollout", "token_l") and not key.endswith("0.pb")} == {
        *(f"batches/{step:08d}.pb" for step in range(1, 6)),
        *(f"rollouts/{step:08d}/e00000001-ab/rollouts.pb.zst" for step in (3, 4, 5)),
        *(f"token_logs/{step:08d}/0000.bin" for step in (3, 4, 5)),
    }
    assert "retirements/00000001.json" in own and NAMES.batch_header(0).removeprefix(NAMES.root) in own


class Dying(LocalStore):
    """A store whose process dies after so many removals."""

    left = 0

    def delete(self, key: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        super().delete(key)


@pytest.mark.parametrize("lives", range(13))
def test_a_writer_that_dies_anywhere_in_a_pass_has_a_successor_that_ends_it(tmp_path, lives):
    store = Dying(tmp_path)
    committed(store, range(8))
    rule, view = RetentionRule(batches=2), RunNeeds(next_step=8, checkpoints=[4, 5])
    store.left = lives
    with pytest.raises(KeyboardInterrupt) if lives < 12 else contextlib.nullcontext():
        Retention(store, NAMES, first=0, by="me").run(rule, view)
    store.left = 100
    for step in (2, 4):  # the trainer goes on meanwhile
        record_retirement(store, NAMES, {KeptAs.CHECKPOINTS: Retired(below=step, why="a key")}, by="trainer")
    assert Retention(store, NAMES, first=0, by="other").run(rule, view) == []
    record = newest_retirement(store, NAMES)
    assert record is not None and (record.number, record.of(KeptAs.BATCHES).below) == (3, 4)
    left = [keys_at(store, NAMES, KeptAs.BATCHES, step=step) for step in range(8)]
    assert [len(keys) for keys in left] == [0] * 4 + [3] * 4


@pytest.mark.parametrize("lives", range(13))
def test_what_a_pass_of_an_ended_run_has_left_is_removed_and_nothing_more(tmp_path, lives):
    store = Dying(tmp_path)
    committed(store, range(8))
    rule, view = RetentionRule(batches=2), RunNeeds(next_step=8, checkpoints=[4, 5])
    store.left = lives
    with pytest.raises(KeyboardInterrupt) if lives < 12 else contextlib.nullcontext():
        Retention(store, NAMES, first=0, by="me").run(rule, view)
    store.left = 100
    committed(store, range(8, 12))
    assert Retention(store, NAMES, first=0, by="who seals the run").finish() == []
    record = newest_retirement(store, NAMES)
    assert record is not None and record.number == 1, "nothing more is retired"
    left = [keys_at(store, NAMES, KeptAs.BATCHES, step=step) for step in range(12)]
    assert [len(keys) for keys in left] == [0] * 4 + [3] * 8


class Counting(LocalStore):
    """A store that counts what it is asked for."""

    count = 0

    def list(self, prefix, **options):
        self.count += 1
        return super().list(prefix, **options)

    def head(self, key):
        self.count += 1
        return super().head(key)


def test_a_pass_costs_as_much_at_any_step(tmp_path):
    """The law: what a pass asks of the store grows with the steps that it retires, and not with those before them."""
    store, rule = Counting(tmp_path), RetentionRule(batches=2)
    costs = []
    for first in (0, 1000, 4000):
        retention = Retention(store, NAMES, first=0, by="me")
        record_retirement(store, NAMES, {KeptAs.BATCHES: Retired(below=first)}, by="me")
        retention.run(rule, RunNeeds(next_step=first, checkpoints=[]))  # ends the pass before
        store.count = 0
        retention.run(rule, RunNeeds(next_step=first + 20, checkpoints=[first + 10, first + 15]))
        costs.append(store.count)
    assert max(costs) <= min(costs) + 6, costs


def test_a_run_that_is_switched_on_late_is_caught_up_in_passes(tmp_path):
    store, rule = Counting(tmp_path), RetentionRule(batches=2)
    view = RunNeeds(next_step=3000, checkpoints=[2990, 2995])
    retention, bounds = Retention(store, NAMES, first=0, by="me"), []
    for _ in range(4):
        retention.run(rule, view)
        record = newest_retirement(store, NAMES)
        assert record is not None
        bounds.append(record.of(KeptAs.BATCHES).below)
    assert bounds == [MOST_PER_PASS, 2 * MOST_PER_PASS, 2990, 2990]


def test_a_kind_without_a_class_cannot_be_declared():
    with pytest.raises(TypeError, match="kept"):
        ObjectKind(name="x", key="x/{step:08d}", named_by=())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="neither step nor version"):
        ObjectKind(name="x", key="x/{number:08d}", named_by=(), kept=KeptAs.BATCHES)


def test_rules_are_of_the_config_until_a_resume_says_otherwise():
    text = {
        "model": {"name": "m"},
        "orchestrator": {"env": [{"id": "e"}], "rollouts_per_example": 2, "retain_batches": 8},
    }
    config = RLConfig.model_validate(text)
    for said, wanted in [({}, (8, None)), ({"policies": 2}, (8, 2)), ({"batches": None}, (None, None))]:
        rule = RetentionRule.of(config, said)
        assert (rule.batches, rule.policies) == wanted and bool(rule) == (wanted != (None, None))
