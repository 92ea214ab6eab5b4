"""The spool against a real disk: what a predecessor left, what is torn, what does not fit."""

import asyncio
import hashlib
import multiprocessing
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from millrace.env_server.spool import Spool
from millrace.errors import CapacityError, InvalidStateError
from millrace.rollouts.types import Purpose, Rollout, RolloutError, RolloutStatus
from millrace.rollouts.wire import encode_rollout
from millrace.telemetry import waits
from millrace_testing.full_disk import largest_file
from millrace_testing.polling import until

LIMIT = 1 << 20


def make_rollout(ordinal: int, *, uid: str = "run1", size: int = 100, purpose: Purpose = Purpose.TRAIN) -> Rollout:
    return Rollout(
        run_uid=uid,
        purpose=purpose,
        ordinal=ordinal,
        member=0,
        attempt=0,
        group_size=1,
        env="e",
        task_index=0,
        task_id="t" * size,
        status=RolloutStatus.ENV_ERROR,
        error=RolloutError(type="E", message="failed"),
        temperature=4.0,
        planned_step=ordinal // 4,
    )


def encoded(rollout: Rollout) -> bytes:
    return encode_rollout(rollout)


async def test_a_successor_finds_exactly_the_bytes(tmp_path: Path) -> None:
    first = Spool(tmp_path, limit_bytes=LIMIT)
    rollouts = [make_rollout(3), make_rollout(12_345_678_901_234), make_rollout(0, purpose=Purpose.EVAL)]
    for rollout in rollouts:
        await first.keep(rollout)
    await first.keep(make_rollout(1, uid="run2"))
    size = first.num_bytes
    await first.close()
    second = Spool(tmp_path, limit_bytes=LIMIT)
    assert second.num_bytes == size and sorted(second.run_uids) == ["run1", "run2"]
    found = {kept.ordinal: kept for kept in second.of_run("run1")}
    assert [found[rollout.ordinal].is_eval for rollout in rollouts] == [False, False, True]
    for rollout in rollouts:
        kept = found[rollout.ordinal]
        assert await second.read(kept) == encoded(rollout)
        assert kept.h == hashlib.sha256(encoded(rollout)).hexdigest()
    await second.drop_run("run1")
    assert second.run_uids == ["run2"] and not (tmp_path / "run1").exists()
    await second.close()


async def test_dropped_rollouts_leave_no_file_and_no_bytes(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    kept = await spool.keep(make_rollout(1))
    await spool.drop([kept, kept])
    assert spool.num_bytes == 0 and not list(tmp_path.glob("*/*.rollouts")) and await spool.read(kept) is None
    await spool.close()


@pytest.mark.parametrize("damage", ["changed", "lost"])
async def test_a_damaged_rollout_is_put_aside_and_never_given_out(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    await spool.keep(make_rollout(1))
    good = await spool.keep(make_rollout(2))
    await spool.close()
    [path] = tmp_path.glob("run1/000000000001-*.rollouts")
    if damage == "changed":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    successor = Spool(tmp_path, limit_bytes=LIMIT)
    [bad] = [kept for kept in successor.of_run("run1") if kept.ordinal == 1]
    if damage == "lost":
        path.unlink()
    assert await successor.read(bad) is None
    assert "damaged" in caplog.text and not path.exists()
    assert [kept.h for kept in successor.of_run("run1")] == [good.h]
    if damage != "lost":
        assert (tmp_path / "damaged" / f"run1-000000000001-{bad.h}").exists()
    await successor.close()


@pytest.mark.parametrize("left", [0, 3, 60, -1])
async def test_what_is_torn_is_not_taken_over_and_put_aside(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine lost power: the file ends inside its only record, or is empty."""
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    await spool.keep(make_rollout(1))
    good = await spool.keep(make_rollout(2))
    await spool.close()
    [path] = tmp_path.glob("run1/000000000001-*.rollouts")
    path.write_bytes(path.read_bytes()[:left])
    successor = Spool(tmp_path, limit_bytes=LIMIT)
    assert [kept.h for kept in successor.of_run("run1")] == [good.h]
    assert "damaged" in caplog.text and not path.exists() and (tmp_path / "damaged" / f"run1-{path.name}").exists()
    await successor.close()


async def test_what_finishes_together_is_one_file_and_damage_to_one_costs_no_other(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    together = [make_rollout(ordinal) for ordinal in range(8)] + [make_rollout(9, uid="run2")]
    await asyncio.gather(*(spool.keep(rollout) for rollout in together))
    await spool.close()
    [path], [_] = tmp_path.glob("run1/*"), tmp_path.glob("run2/*")
    data = bytearray(path.read_bytes())
    data[data.index(encoded(together[3])) + 5] ^= 1
    path.write_bytes(data)
    successor = Spool(tmp_path, limit_bytes=LIMIT)
    kept = successor.of_run("run1")
    read = [await successor.read(each) for each in kept]
    assert read == [None if ordinal == 3 else encoded(together[ordinal]) for ordinal in range(8)]
    await successor.drop(successor.of_run("run1")[:-1])
    assert path.exists()
    assert await successor.read(kept[7]) == encoded(together[7])
    await successor.drop(successor.of_run("run1"))
    assert not path.exists()
    await successor.close()


async def test_a_file_that_cannot_be_read_keeps_no_env_server_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Spool(tmp_path, limit_bytes=LIMIT)
    await first.keep(make_rollout(1))
    await first.close()
    (tmp_path / "run1" / f"{2:012d}-{'0' * 64}.rollouts").mkdir()  # no user may read a directory as a file
    second = Spool(tmp_path, limit_bytes=LIMIT)
    assert [kept.ordinal for kept in second.of_run("run1")] == [1] and "cannot be read" in caplog.text
    await second.close()


async def test_only_its_own_files_are_touched(tmp_path: Path) -> None:
    (tmp_path / "run1").mkdir()
    foreign, cut = tmp_path / "run1" / "thesis.tmp", tmp_path / "run1" / f".{'a' * 64}.tmp"
    foreign.touch()
    cut.touch()
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    assert foreign.exists() and not cut.exists() and spool.run_uids == []
    await spool.close()


async def test_the_bound_names_the_sizes_and_the_remedy(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=5000)
    spool.require_room()
    kept = await spool.keep(make_rollout(1, size=6000))
    with pytest.raises(CapacityError, match=r"1 finished rollouts of 1 runs in 0\.0 MiB .* MILLRACE_SPOOL_BYTES") as e:
        spool.require_room()
    assert e.value.reason == "SPOOL_FULL" and str(tmp_path) in str(e.value)
    assert e.value.metadata == {"num_runs": "1"}
    await spool.drop([kept])
    spool.require_room()
    await spool.close()


async def test_what_the_disk_refuses_waits_in_memory_and_is_written_later(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    big = make_rollout(1, size=300_000)
    with largest_file(200_000):
        kept = await spool.keep(big)
        assert not kept.is_written and await spool.read(kept) == encoded(big)
        with pytest.raises(CapacityError, match=r"1 finished rollouts could not be written .* File too large") as e:
            spool.require_room()
        assert e.value.reason == "SPOOL_UNWRITABLE"
        await until(
            lambda: any("room for 1 finished rollouts" in wait.reason for wait in waits.snapshot("x")), timeout_s=10
        )
        assert not list(tmp_path.glob("run1/*")) and not list(tmp_path.glob("run1/.*.tmp"))
        spool.note_appended(kept)
        assert kept.data is not None  # the log may still lose it
    await until(lambda: kept.is_written and kept.data is None, timeout_s=10)
    spool.require_room()
    assert await spool.read(kept) == encoded(big)
    await spool.close()


async def test_one_env_server_per_directory(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    with pytest.raises(
        InvalidStateError, match=r"another env-server \(pid \d+\) uses .*\(MILLRACE_SPOOL_DIR"
    ) as caught:
        Spool(tmp_path, limit_bytes=LIMIT)
    assert caught.value.reason == "SPOOL_IN_USE"
    await spool.close()
    await Spool(tmp_path, limit_bytes=LIMIT).close()


def _keep_and_die(directory: str) -> None:
    async def keep() -> None:
        spool = Spool(Path(directory), limit_bytes=LIMIT)
        await spool.keep(make_rollout(7))
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(keep())


async def test_kill_9_leaves_the_file_and_not_the_lock(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_keep_and_die, args=(str(tmp_path),))
    process.start()
    await asyncio.to_thread(process.join, 60)
    assert process.exitcode == -9
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    [kept] = spool.of_run("run1")
    assert await spool.read(kept) == encoded(make_rollout(7))
    await spool.close()


async def test_without_a_directory_nothing_is_left_behind() -> None:
    spool = Spool(None, limit_bytes=LIMIT)
    await spool.keep(make_rollout(1))
    await spool.close()
    assert not spool.directory.exists()


async def test_a_slow_disk_is_one_wait_with_a_count_and_a_quick_one_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    goes_on = threading.Event()
    blocked = asyncio.get_running_loop().run_in_executor(spool.executor, goes_on.wait, 30)
    keeping = [asyncio.create_task(spool.keep(make_rollout(ordinal))) for ordinal in range(100)]
    await asyncio.sleep(0)

    def on_disk() -> list[waits.Wait]:
        return [wait for wait in waits.snapshot("env-server-0") if wait.waits_on == "disk"]

    try:
        assert on_disk() == []  # younger than two seconds
        clock = waits.REGISTRY.clock
        monkeypatch.setattr(waits.REGISTRY, "clock", lambda: clock() + 3)
        (wait,) = on_disk()
        assert wait.reason == f"100 reads and writes of the spool {tmp_path}" and 3 <= wait.age_s < wait.deadline_s
    finally:
        monkeypatch.undo()
        goes_on.set()
        await asyncio.gather(blocked, *keeping)
        await spool.close()


async def test_the_next_run_does_not_wait_for_the_files_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that deletes thousands of files slowly."""
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    for ordinal in range(20):
        await spool.keep(make_rollout(ordinal))
    deleting, may_go_on = threading.Event(), threading.Event()
    real = shutil.rmtree

    def slow(*args: Any, **kwargs: Any) -> None:
        deleting.set()
        may_go_on.wait(60)
        real(*args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", slow)
    dropping = asyncio.create_task(spool.drop_run("run1"))
    await asyncio.to_thread(deleting.wait, 60)
    assert spool.num_bytes == 0 and spool.run_uids == []
    kept = await spool.keep(make_rollout(0, uid="run2"))
    assert kept.is_written and not dropping.done() and not (tmp_path / "run1").exists()
    may_go_on.set()
    await dropping
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run2"]
    await spool.close()


async def test_a_deletion_that_was_cut_short_is_finished_by_a_successor(tmp_path: Path) -> None:
    left = tmp_path / ".dropped-1-run1"
    left.mkdir()
    (left / "t-000000000001.rollout").write_bytes(b"x")
    spool = Spool(tmp_path, limit_bytes=LIMIT)
    assert spool.run_uids == []
    await until(lambda: not left.exists())
    await spool.close()
