"""`run repair` on a recorded run: each kind of object is damaged, restored from what proves it, and kept aside."""

import asyncio
import hashlib
import json
import shutil
import sys

import pytest
from recorded_log import STEPS, audit, flip, record

from millrace.runlog.names import Deployment
from millrace.runlog.repair import State, repair_run
from millrace.storage.local import LocalStore


@pytest.fixture
async def run(log, redis, local_store):
    run = await record(log, redis, local_store)
    local_store.create(Deployment(log.names.prefix).name_object("demo"), log.uid.encode())
    return run


@pytest.fixture
def backup(run, tmp_path) -> LocalStore:
    """A replica of the bucket, made before anything is damaged."""
    source = run.store.uri("x").removesuffix("/x").removeprefix("file://")
    shutil.copytree(source, tmp_path / "replica")
    return LocalStore(tmp_path / "replica")


def key_of(run, kind: str) -> str:
    names = run.names
    listed = {
        "epoch": names.epochs("orchestrator"),
        "archived events": names.event_archive,
        "policy manifest": names.policy(0, 1),
        "checkpoint manifest": names.checkpoint(1),
    }
    if kind in listed:
        keys = [info.key for info in run.store.list(listed[kind]) if "/e0" not in info.key and "/e1-" not in info.key]
        return keys[0]
    return {
        "first header": names.batch_header(0),
        "header": names.batch_header(1),
        "closing header": names.batch_header(STEPS),
        "run.json": names.run_json,
        "name": Deployment(names.prefix).name_object("demo"),
        "chunk": run.header(2).chunks[0].key,
        "rollouts": run.header(1).rollouts_key,
        "checkpoint file": f"{names.checkpoint(3)}e00000001-abcd/shard.distcp",
        "policy object": policy_object(run),
    }[kind]


def policy_object(run) -> str:
    """An object that no other version shares."""
    prefix = run.names.policy(0, 2)
    return next(info.key for info in run.store.list(prefix) if not info.key.endswith("manifest.json"))


FROM_REDIS = ["first header", "header", "closing header", "chunk"]
FROM_ITSELF = ["name"]
FROM_BACKUP = ["run.json", "rollouts", "epoch", "policy object", "checkpoint file"]
HOW = {"damaged": flip, "deleted": lambda run, key: run.store.delete(key)}


async def repair(run, *, backup=None, with_redis: bool = False, is_applied: bool = False):
    log = run.log if with_redis else None
    return await repair_run(log, run.store, run.names, backup=backup, is_applied=is_applied)


async def test_a_whole_run_needs_no_repair(run, backup) -> None:
    assert await repair(run, backup=backup, with_redis=True, is_applied=True) == []


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [*FROM_REDIS, *FROM_ITSELF, *FROM_BACKUP])
async def test_what_is_damaged_is_restored_and_kept(run, backup, kind: str, how: str) -> None:
    before = [finding.check for finding in (await audit(run)).violations]
    key = key_of(run, kind)
    right = run.store.get(key)
    HOW[how](run, key)
    wrong = run.store.get(key) if how == "damaged" else None
    source = {"backup": backup} if kind in FROM_BACKUP else {"with_redis": kind in FROM_REDIS}
    (said,) = await repair(run, **source)
    assert (said.key, said.state) == (key, State.RESTORABLE) and said.detail.startswith("proved by ")
    assert (run.store.get(key) if wrong is not None else run.store.head(key)) == wrong, "a dry run changes nothing"
    (done,) = await repair(run, **source, is_applied=True)
    assert done.state is State.RESTORED and run.store.get(key) == right
    if wrong is not None:
        assert run.store.get(done.quarantine) == wrong and hashlib.sha256(wrong).hexdigest()[:16] in done.quarantine
    assert await repair(run, **source) == []
    assert [finding.check for finding in (await audit(run)).violations] == before


async def test_a_header_comes_from_a_backup_that_the_chain_proves(run, backup) -> None:
    for step in (0, 1, 2):
        flip(run, run.names.batch_header(step))
    assert {each.state for each in await repair(run, backup=backup, is_applied=True)} == {State.RESTORED}
    assert await repair(run) == []


async def test_a_backup_with_other_bytes_is_refused(run, backup) -> None:
    header = run.header(1)
    header.reward_mean = 7.0
    backup.put(run.names.batch_header(1), header.SerializeToString(deterministic=True))
    key = run.header(2).chunks[0].key
    backup.put(key, b"forged")
    run.store.delete(run.names.batch_header(1))
    flip(run, key)
    wrong = run.store.get(key)
    found = await repair(run, backup=backup, is_applied=True)
    assert {each.state for each in found} == {State.REFUSED}
    assert any("does not give the chain hash" in each.detail for each in found)
    assert run.store.get(key) == wrong and run.store.head(run.names.batch_header(1)) is None


async def test_what_nobody_has_is_refused_and_says_where_to_look(run) -> None:
    flip(run, key_of(run, "rollouts"))
    (found,) = await repair(run)
    assert found.state is State.REFUSED and "a backup (--from)" in found.detail


async def test_a_checkpoint_behind_a_whole_one_is_not_needed(run) -> None:
    flip(run, key_of(run, "checkpoint file"))
    (found,) = await repair(run)
    assert found.state is State.NOT_NEEDED and "computes the steps since again" in found.detail


async def test_a_repair_that_was_killed_is_finished(run, backup) -> None:
    key = key_of(run, "rollouts")
    right = run.store.get(key)
    flip(run, key)
    wrong = run.store.get(key)
    aside = run.names.quarantined(key, hashlib.sha256(wrong).hexdigest())
    run.store.create(aside, wrong)
    run.store.delete(key)  # it died between the two
    (done,) = await repair(run, backup=backup, is_applied=True)
    assert done.state is State.RESTORED and run.store.get(key) == right and run.store.get(aside) == wrong


async def test_the_command(run, backup) -> None:
    url = run.store.uri("x").removesuffix("/x")
    replica = backup.uri("x").removesuffix("/x")
    common = ["-m", "millrace.cli", "run", "repair", "demo", "--store", url, "--prefix", run.names.prefix]

    async def command(*options: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *common, *options, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()

    assert (await command()) == (0, f"run {run.names.uid}: nothing is damaged or missing\n")
    key = key_of(run, "rollouts")
    flip(run, key)
    code, out = await command("--from", replica)
    assert code == 1 and "restorable" in out and "nothing was changed" in out
    code, out = await command("--from", replica, "--apply", "--json")
    document = json.loads(out)
    assert code == 0 and [each["state"] for each in document["repairs"]] == ["restored"]
    assert (await command())[0] == 0
