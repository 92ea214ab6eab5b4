"""Under which lineage a resumed trainer publishes, from what is in the store."""

from pathlib import Path
from typing import Any, cast

import pytest

from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.job import JobContext, agree_on_plan
from millrace.trainer.publish.plan import PublishPlan


def plan(directory: Path, published: list[tuple[int, int]], *, start_step: int, lineage: int) -> PublishPlan:
    """That of a strict trainer with as many ranks as saved its checkpoint."""
    store, names = LocalStore(directory), Names("test", "a-run")
    for number, version in published:
        store.create(names.policy_manifest(number, version), b"{}")
    nobody = cast("Any", None)
    context = JobContext(
        background=nobody,
        store=store,
        redis_url="",
        prefix="test",
        gang=Gang(),
        owner="",
        slot="",
        should_stop=nobody,
        on_epoch=nobody,
        on_progress=nobody,
    )
    return agree_on_plan(context, names, start_step=start_step, lineage=lineage, strict=True, is_relaid=False)


@pytest.mark.parametrize("in_new_lineage", [(), (15, 16)])
def test_a_strict_lineage_has_no_versions_of_the_one_before(tmp_path: Path, in_new_lineage: tuple[int, ...]) -> None:
    """Other ranks computed the steps up to 14 again in lineage 1, and saved checkpoint 12: 12 to 14 are as they are.

    Published once more, version 12 would be refused by the log, which has another one, and the run would fail.
    """
    published = [(0, version) for version in range(15)] + [(1, version) for version in in_new_lineage]
    assert plan(tmp_path, published, start_step=12, lineage=1) == PublishPlan(lineage=1, first_version=15)


def test_a_strict_lineage_is_proved_from_the_checkpoint_on(tmp_path: Path) -> None:
    published = [(0, version) for version in range(15)] + [(1, version) for version in range(15, 19)]
    assert plan(tmp_path / "a", published, start_step=17, lineage=1) == PublishPlan(lineage=1, first_version=17)
    assert plan(tmp_path / "b", published[:15], start_step=12, lineage=0) == PublishPlan(lineage=0, first_version=12)
