"""A new kind of object is one declaration and one codec: what else there is of each kind has its rows by itself."""

import importlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.readers.repair import RepairState, repair_run
from millrace.runlog import catalogue
from millrace.runlog.names import Names
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.revisions import list_headers
from millrace.runlog.records.sealed import Seal
from millrace.runlog.seal import write_seal
from millrace.storage.local import LocalStore
from millrace_testing.fuzz import run as lane
from millrace_testing.fuzz import targets
from millrace_testing.fuzz.mutate import spliced
from millrace_testing.runlog.committed import known_by
from millrace_testing.runlog.recipes import RECIPE, encode_recipe
from millrace_testing.runlog.scene import Scene, objects, read_header, record_scene
from millrace_testing.runlog.tamperings import add, expected_depth, is_finding, picks, rows


@pytest.fixture(scope="module", autouse=True)
def declared() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "KINDS", [*catalogue.KINDS, RECIPE])
        yield


@pytest.fixture(scope="module")
def recorded(declared, tmp_path_factory, redis_url) -> Scene:
    """Two runs that end with three recipes each."""
    scene = record_scene(tmp_path_factory.mktemp("recorded"), redis_url)
    store = LocalStore(scene.directory)
    for names in (scene.names, scene.other):
        for number in range(1, 4):
            store.create(names.root + RECIPE.path(number=number), encode_recipe([number, int(names == scene.other)]))
        seal_anew(store, names)
    store.delete(scene.names.attestation(1))  # it names the seal's bytes
    return scene


def seal_anew(store: LocalStore, names: Names) -> None:
    before = Seal.decode(store.get(names.seal(0)), where="it")
    store.delete(names.seal(0))
    known = known_by(read_header(store, names, step) for step, _ in list_headers(store, names))
    chain = bytes.fromhex(before.chain_hash)
    assert write_seal(store, names, names.seal(0), known, chain=chain, state=before.state, by="test")


@pytest.fixture
def scene(recorded) -> Iterator[Scene]:
    yield recorded
    recorded.store.undo()


def test_its_keys_are_read_and_the_documents_have_it():
    assert catalogue.kind_at("recipes/00000002.json") is RECIPE
    assert catalogue.is_place("recipes/left-over") and not catalogue.is_place("recipe/left-over")
    assert "| recipe | `recipes/{number:08d}.json` |  |  |\n" in catalogue.table()


def test_headers_and_seals_name_it(recorded):
    keys = objects(recorded.store, recorded.names)[RECIPE]
    found = KnownObjects().find_new(recorded.store, recorded.names)
    assert len(keys) == 3 and {each.key for each in found} >= {key.removeprefix(recorded.names.root) for key in keys}
    assert list(recorded.audit("deep").violations) == []


def test_the_tables_of_tamperings_have_it(scene):
    ways = [way for kind, way in rows() if kind == RECIPE]
    assert len(ways) == 7
    keys = objects(scene.store, scene.names)[RECIPE]
    for way in ways:
        for key in picks(keys, way):
            before = scene.store.get(key)
            way(scene, key, keys)
            checks = {each.check for each in scene.audit(expected_depth(RECIPE, way, scene, key, before)).violations}
            assert any(is_finding(RECIPE, way, check) for check in checks), (way.__name__, key, checks)
            scene.store.undo()
    key = add(scene, RECIPE)
    assert [each.check for each in scene.audit("fast").violations if key in each.message] == ["RECIPE_UNNAMED"]


@pytest.mark.parametrize(("number", "data", "check"), [(2, None, "RECIPE_MISSING"), (3, b"[]", "RECIPE_CORRUPT")])
def test_the_audit_reads_it_also_where_nothing_names_it(scene, number, data, check):
    scene.store.delete(scene.names.seal(0))
    key = scene.names.root + RECIPE.path(number=number)
    scene.store.delete(key)
    if data is not None:
        scene.store.put(key, data)
    assert check in {each.check for each in scene.audit("fast").violations}


def test_the_fuzz_lane_has_it(scene, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "TARGETS", targets.TARGETS)
    (target,) = (each for each in importlib.reload(targets).TARGETS if each.name == "recipe")
    seeds = [scene.store.get(key) for key in objects(scene.store, scene.names)[RECIPE]]
    decode, encode = target.load()
    rng, decoded = random.Random(1), 0
    for _ in range(100):
        decoded += lane.check(target, decode, encode, spliced(rng, seeds, target.mutate()))
    assert 0 < decoded < 100


async def repaired(scene: Scene, backup: LocalStore) -> dict[str, RepairState]:
    found = await repair_run(None, scene.store, scene.names, backup=backup)
    return {each.key: each.state for each in found if "retired" not in each.detail}


async def test_a_repair_restores_it_and_names_one_that_nobody_has(scene, tmp_path: Path):
    first, second, third = objects(scene.store, scene.names)[RECIPE]
    backup = LocalStore(tmp_path)
    backup.create(second, scene.store.get(second))
    scene.store.put(second, b"{}")
    scene.store.delete(third)
    repairs = await repaired(scene, backup)
    assert repairs == {second: RepairState.RESTORABLE, third: RepairState.REFUSED}
    scene.store.delete(scene.names.seal(0))  # nothing names them then
    scene.store.delete(first)
    repairs = await repaired(scene, backup)
    assert repairs == {first: RepairState.REFUSED, second: RepairState.REFUSED}
