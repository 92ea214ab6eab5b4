from collections import Counter

import pytest

from millrace.orchestrator.play.tasks import TaskOrder, TaskSource


def source(env: str, num_tasks: int, *, digest: str = "d", weight: float = 1.0) -> TaskSource:
    return TaskSource(env=env, num_tasks=num_tasks, digest=digest, weight=weight)


def test_one_environment_draws_every_task_once_per_epoch() -> None:
    order = TaskOrder([source("a", 7)], seed=3)
    epochs = [[order.task(7 * epoch + i).task_index for i in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch is shuffled anew"


def test_order_is_a_pure_function_of_its_inputs() -> None:
    first = TaskOrder([source("a", 50), source("b", 30)], seed=1)
    second = TaskOrder([source("a", 50), source("b", 30)], seed=1)
    ordinals = [5, 999, 3, 100_000, 3]
    assert [first.task(i) for i in ordinals] == [second.task(i) for i in ordinals]
    assert [first.task(i) for i in range(50)] != [
        TaskOrder([source("a", 50), source("b", 30)], seed=2).task(i) for i in range(50)
    ]
    assert [first.task(i) for i in range(50)] != [
        TaskOrder([source("a", 50, digest="other"), source("b", 30)], seed=1).task(i) for i in range(50)
    ]


def test_weights_set_the_share_and_each_environment_keeps_its_epochs() -> None:
    order = TaskOrder([source("a", 10, weight=3.0), source("b", 7, weight=1.0)], seed=0)
    tasks = [order.task(i) for i in range(4000)]
    counts = Counter(task.env for task in tasks)
    assert counts == {"a": 3000, "b": 1000}
    per_task = Counter(task.task_index for task in tasks if task.env == "b")
    assert max(per_task.values()) - min(per_task.values()) <= 1


def test_no_environment_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one environment"):
        TaskOrder([], seed=0)
