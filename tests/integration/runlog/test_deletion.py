"""`millrace run delete`: what goes, what it refuses, and how it goes on after a death."""

import asyncio
import json

import pytest
import redis
from click.testing import CliRunner

from millrace.cli.commands.run.delete import delete
from millrace.errors import InvalidStateError, NotFoundError
from millrace.runlog import open_redis
from millrace.runlog.deletion import (
    Deletion,
    begin_deletion,
    delete_run,
    find_tombstone,
    forget_run,
    mark_deleted,
    plan_deletion,
    require_unneeded,
)
from millrace.runlog.index import read_names
from millrace.runlog.names import Deployment, Names
from millrace.storage.local import LocalStore
from millrace_testing.lanes import pairs_by_default
from millrace_testing.runlog.scene import PREFIX, Scene, record_scene


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, redis_url) -> Scene:
    return record_scene(tmp_path_factory.mktemp("deleted"), redis_url)


@pytest.fixture
def scene(recorded, tmp_path) -> Scene:
    return recorded.copy(tmp_path / "store")


def fork_of(scene: Scene) -> Names:
    names = Names(PREFIX, "00fork")
    document = {"name": "child", "parent": {"uid": scene.names.uid, "name": "demo"}}
    scene.store.create(names.run_json, json.dumps(document).encode())
    return names


def keys(scene: Scene) -> set[str]:
    return {info.key for info in scene.store.list(f"{PREFIX}/")}


def test_a_run_goes_whole_and_nothing_else_goes(scene):
    others = {key for key in keys(scene) if not key.startswith(scene.names.root) and not key.endswith("demo")}
    scene.store.create(Deployment(PREFIX).open_object(scene.names.uid), b"demo")
    plan = plan_deletion(scene.store, scene.names)
    assert (plan.name, plan.is_open, plan.needed_by) == ("demo", False, ())
    assert sum(plan.counts.values()) == sum(1 for _ in scene.store.list(scene.names.root))
    assert plan.sizes.total() == sum(info.size_bytes for info in scene.store.list(scene.names.root))
    assert delete_run(scene.store, plan, by="me") == []
    assert keys(scene) == others
    assert list(read_names(scene.store, Deployment(PREFIX)).runs) == ["other"]
    with pytest.raises(NotFoundError, match="holds nothing of a run"):
        plan_deletion(scene.store, scene.names)


def test_an_open_run_and_the_parent_of_a_fork_stay_unless_it_is_said(scene):
    scene.store.delete(scene.names.batch_header(12))
    fork_of(scene)
    plan = plan_deletion(scene.store, scene.names)
    assert plan.is_open and plan.needed_by == ("child",)
    with pytest.raises(InvalidStateError, match="has not ended") as caught:
        require_unneeded(plan, may_be_open=False, may_be_needed=True)
    assert caught.value.reason == "RUN_OPEN" and "run cancel demo" in (caught.value.remedy or "")
    with pytest.raises(InvalidStateError, match="is the parent of child") as caught:
        require_unneeded(plan, may_be_open=True, may_be_needed=False)
    assert caught.value.reason == "RUN_NEEDED"
    require_unneeded(plan, may_be_open=True, may_be_needed=True)


class Dying(LocalStore):
    """A store whose process dies after so many removals."""

    left = 0

    def delete(self, key: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        super().delete(key)


@pytest.mark.parametrize(
    "lives", [0, 2, -1, *(pytest.param(lives, marks=pytest.mark.long) for lives in (1, 3, 60, -2))]
)
def test_a_deletion_that_dies_is_ended_by_the_next_one(scene, lives):
    store, plan = Dying(scene.directory), plan_deletion(scene.store, scene.names)
    store.left = lives if lives >= 0 else sum(plan.counts.values()) + 3 + lives  # a tombstone and two names besides
    with pytest.raises(KeyboardInterrupt):
        delete_run(store, plan, by="me")
    uid = scene.names.uid
    assert find_tombstone(scene.store, PREFIX, "demo") == find_tombstone(scene.store, PREFIX, uid) == uid
    again = plan_deletion(scene.store, scene.names)
    assert again.name == "demo" and not again.is_open
    assert delete_run(scene.store, again, by="me") == []
    assert not [key for key in keys(scene) if uid in key or key.endswith("demo")]


def test_the_command_shows_what_goes_and_deletes_when_it_is_told_to(scene):
    options = ["--store", scene.directory.as_uri(), "--prefix", PREFIX]
    shown = CliRunner().invoke(delete, ["demo", "--dry-run", *options], standalone_mode=False)
    assert "batch header" in shown.output and "MB" in shown.output and keys(scene)
    refused = CliRunner().invoke(delete, ["demo", *options], standalone_mode=False)
    assert "nobody can be asked" in str(refused.exception) and scene.store.head(scene.names.tombstone) is None
    done = CliRunner().invoke(delete, ["demo", "--yes", *options], standalone_mode=False)
    assert "is deleted" in done.output and scene.store.head(scene.names.run_json) is None


# A run that has not ended.


@pytest.mark.parametrize("role", ["orchestrator", "trainer"])
def test_a_run_that_something_drives_is_not_deleted_even_if_open_ones_are(scene, redis_url, role):
    scene.store.delete(scene.names.batch_header(12))
    options = ["demo", "--yes", "--even-open", "--store", scene.directory.as_uri(), "--prefix", PREFIX]
    refused = CliRunner().invoke(delete, options, standalone_mode=False)
    assert "--even-open needs --redis" in str(refused.exception)
    lease = json.dumps({"owner": "o-1", "token": "0" * 16, "epoch": 1, "slot": ""})
    with redis.Redis.from_url(redis_url) as client:
        client.hset(Deployment(PREFIX).runs_key, "demo", scene.names.uid)
        client.set(scene.names.lease(role), lease, px=60_000)
        refused = CliRunner().invoke(delete, [*options, "--redis", redis_url], standalone_mode=False)
        assert isinstance(refused.exception, InvalidStateError) and refused.exception.reason == "RUN_HELD"
        assert f"the {role} of run 'demo' is alive: 'o-1' holds its lease" in str(refused.exception)
        assert scene.store.head(scene.names.tombstone) is None, "nothing was begun"
        client.delete(scene.names.lease(role))
        done = CliRunner().invoke(delete, [*options, "--redis", redis_url], standalone_mode=False)
        assert "is deleted" in done.output and scene.store.head(scene.names.run_json) is None
        assert client.keys(f"*{scene.names.uid}*") == []


def test_a_redis_that_knows_nothing_of_an_open_run_does_not_say_that_nobody_drives_it(scene, redis_url):
    scene.store.delete(scene.names.batch_header(12))
    options = ["demo", "--yes", "--even-open", "--store", scene.directory.as_uri(), "--prefix", PREFIX]
    refused = CliRunner().invoke(delete, [*options, "--redis", redis_url], standalone_mode=False)
    assert isinstance(refused.exception, InvalidStateError) and refused.exception.reason == "RUN_UNKNOWN_TO_REDIS"
    assert scene.store.head(scene.names.tombstone) is None, "nothing was begun"
    with redis.Redis.from_url(redis_url) as client:
        client.hset(Deployment(PREFIX).runs_key, "demo", "0" * 28)
        refused = CliRunner().invoke(delete, [*options, "--redis", redis_url], standalone_mode=False)
        assert refused.exception is not None and "knows no run 'demo'" in str(refused.exception), "another run's name"
        client.hset(Deployment(PREFIX).runs_key, "demo", scene.names.uid)
        done = CliRunner().invoke(delete, [*options, "--redis", redis_url], standalone_mode=False)
        assert "is deleted" in done.output


async def die_after(scene: Scene, redis_url: str, point: str) -> None:
    """Delete the run, open as it is, until a death after `point`."""
    store, plan = Dying(scene.directory), plan_deletion(scene.store, scene.names)
    assert plan.is_open
    mark_deleted(store, plan, by="one that dies")
    async with open_redis(redis_url) as client:
        if point != "tombstone":
            await forget_run(client, plan)
    if point == "names":
        store.left = len(plan.marks) + (2 if plan.request_id else 1)
        with pytest.raises(KeyboardInterrupt):
            delete_run(store, plan, by="one that dies")


@pytest.mark.parametrize(("point", "has_redis"), pairs_by_default(["tombstone", "Redis", "names"], [True, False]))
def test_a_deletion_of_an_open_run_that_dies_is_ended_by_the_next_one(scene, redis_url, point, has_redis):
    scene.store.delete(scene.names.batch_header(12))
    scene.store.create(Deployment(PREFIX).open_object(scene.names.uid), b"demo")
    with redis.Redis.from_url(redis_url) as client:
        client.hset(Deployment(PREFIX).runs_key, "demo", scene.names.uid)
        asyncio.run(die_after(scene, redis_url, point))
        assert (client.hget(Deployment(PREFIX).runs_key, "demo") is None) == (point != "tombstone")
        assert (scene.store.head(Deployment(PREFIX).name_object("demo")) is None) == (point == "names")
        options = ["demo", "--yes", "--store", scene.directory.as_uri(), "--prefix", PREFIX]
        options += ["--redis", redis_url] if has_redis else []
        done = CliRunner().invoke(delete, options, standalone_mode=False)
        assert "is deleted" in done.output, done.exception
        client.hdel(Deployment(PREFIX).runs_key, "demo")
    assert not [key for key in keys(scene) if scene.names.uid in key or key.endswith("demo")]


async def begin(scene: Scene, redis_url: str, plan: Deletion) -> None:
    async with open_redis(redis_url) as client:
        await begin_deletion(client, scene.store, plan, by="me")


def test_a_tombstone_of_an_older_version_is_read_and_an_open_run_asks_for_the_option_again(scene, redis_url):
    old = json.dumps({"name": "demo", "request_id": "", "by": "old", "time": "2026-01-01T00:00:00.000+00:00"}).encode()
    scene.store.create(scene.names.tombstone, old)
    assert not plan_deletion(scene.store, scene.names).is_open, "it ended"
    scene.store.delete(scene.names.batch_header(12))
    plan = plan_deletion(scene.store, scene.names)
    with pytest.raises(InvalidStateError, match="an earlier deletion of it has begun") as caught:
        require_unneeded(plan, may_be_open=False, may_be_needed=False)
    assert caught.value.reason == "RUN_OPEN" and scene.names.tombstone in (caught.value.remedy or "")
    assert scene.store.get(scene.names.tombstone) == old
    asyncio.run(begin(scene, redis_url, plan))
    assert delete_run(scene.store, plan, by="me") == []
    assert not [key for key in keys(scene) if scene.names.uid in key]


@pytest.mark.parametrize("left", ["all but its record", "nothing but its name"])
def test_a_run_without_its_record_is_deleted_and_its_name_is_free(scene, left):
    deployment = Deployment(PREFIX)
    scene.store.create(deployment.request_object("asked-once"), scene.names.uid.encode())
    scene.store.create(f"{deployment.names_prefix}a folder/foreign", scene.names.uid.encode())
    for info in list(scene.store.list(scene.names.root)):
        if info.key == scene.names.run_json or left == "nothing but its name":
            scene.store.delete(info.key)
    plan = plan_deletion(scene.store, scene.names)
    assert (plan.name, plan.request_id, plan.is_open) == ("demo", "asked-once", False)
    options = ["--store", scene.directory.as_uri(), "--prefix", PREFIX]
    done = CliRunner().invoke(delete, ["demo", "--yes", *options], standalone_mode=False)
    assert "is deleted" in done.output
    assert not list(scene.store.list(scene.names.root))
    assert read_names(scene.store, deployment).runs.keys() == {"other"}
    assert scene.store.head(deployment.request_object("asked-once")) is None
    with pytest.raises(NotFoundError, match="holds nothing of a run"):
        plan_deletion(scene.store, scene.names)


# Two deletions at once.


def test_a_deletion_that_is_refused_takes_back_its_own_tombstone_only(scene):
    late = plan_deletion(scene.store, scene.names)
    fork_of(scene)
    mark_deleted(scene.store, plan_deletion(scene.store, scene.names), by="one that may delete it with its fork")
    said = scene.store.get(scene.names.tombstone)
    with pytest.raises(InvalidStateError, match="was forked while"):
        mark_deleted(scene.store, late, by="another")
    assert scene.store.get(scene.names.tombstone) == said
    scene.store.delete(scene.names.tombstone)
    with pytest.raises(InvalidStateError, match="was forked while"):
        mark_deleted(scene.store, late, by="another")
    assert scene.store.head(scene.names.tombstone) is None


def test_a_lease_that_is_taken_late_takes_back_no_tombstone_of_another_deletion(scene, redis_url, monkeypatch):
    ours, theirs = (plan_deletion(scene.store, scene.names) for _ in range(2))
    lease = json.dumps({"owner": "o-1", "token": "0" * 16, "epoch": 1, "slot": ""})
    create = type(scene.store).create

    def create_late(self, key: str, data: bytes) -> bool:
        if key == scene.names.tombstone:
            client.set(scene.names.lease("trainer"), lease, px=60_000)
        return create(self, key, data)

    with redis.Redis.from_url(redis_url) as client:
        for other in (None, theirs):
            if other is not None:
                mark_deleted(scene.store, other, by="another")
            client.delete(scene.names.lease("trainer"))
            with monkeypatch.context() as patched, pytest.raises(InvalidStateError, match="holds its lease"):
                patched.setattr(type(scene.store), "create", create_late)
                asyncio.run(begin(scene, redis_url, ours))
            assert (scene.store.head(scene.names.tombstone) is None) == (other is None)
        client.delete(scene.names.lease("trainer"))
