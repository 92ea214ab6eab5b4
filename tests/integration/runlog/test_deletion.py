"""`millrace run delete`: what goes, what it refuses, and how it goes on after a death."""

import json

import pytest
from click.testing import CliRunner

from millrace.cli.commands.run.delete import delete
from millrace.errors import InvalidStateError, NotFoundError
from millrace.runlog.deletion import delete_run, find_tombstone, plan_deletion, require_unneeded
from millrace.runlog.index import read_names
from millrace.runlog.names import Deployment, Names
from millrace.storage.local import LocalStore
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


@pytest.mark.parametrize("lives", [0, 1, 2, 3, 60, -2, -1])
def test_a_deletion_that_dies_is_ended_by_the_next_one(scene, lives):
    store, plan = Dying(scene.directory), plan_deletion(scene.store, scene.names)
    store.left = lives if lives >= 0 else sum(plan.counts.values()) + 3 + lives  # a tombstone and two names besides
    with pytest.raises(KeyboardInterrupt):
        delete_run(store, plan, by="me")
    uid = scene.names.uid
    assert find_tombstone(scene.store, PREFIX, "demo") == uid
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
