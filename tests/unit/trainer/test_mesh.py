"""Layouts of ranks: who computes on which samples, and what is refused before anything loads."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.config.load import validate_document
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.sections.trainer import ModelLayoutConfig
from millrace.errors import InvalidSpecError
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model import context_parallel, fit
from millrace.trainer.model.fit import fit_layout
from millrace.trainer.model.mesh import RankLayout
from millrace_testing.trainer import families


def layout(world_size: int, **keys: int) -> RankLayout:
    return RankLayout.of(ModelLayoutConfig.model_validate(keys), world_size=world_size)


def refused(tmp_path: Path, world_size: int, model: dict[str, Any], **keys: int) -> dict[str, str]:
    """Why a layout is refused, by key; there are no weights."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(InvalidSpecError) as caught:
        config = ModelLayoutConfig.model_validate(keys)
        fit_layout(config, tmp_path, world_size=world_size, prefix="trainer.model")
    assert caught.value.reason == "LAYOUT_IMPOSSIBLE"
    assert all(each.value == str(keys[each.field.rpartition(".")[2]]) for each in caught.value.violations)
    return {each.field.removeprefix("trainer.model."): each.message for each in caught.value.violations}


def test_what_is_left_of_the_ranks_shards() -> None:
    assert layout(8) == RankLayout(dp_shard=8)
    assert layout(8, dp_replicate=2) == RankLayout(dp_shard=4, dp_replicate=2)
    assert layout(8, dp_replicate=2, tp=2) == RankLayout(dp_shard=2, dp_replicate=2, tp=2)
    assert layout(2, tp=2) == RankLayout(dp_shard=1, tp=2)
    assert layout(16, cp=2, tp=2, ep=4) == RankLayout(dp_shard=4, cp=2, tp=2, ep=4)


def test_ranks_that_share_layers_compute_on_the_same_samples() -> None:
    found = layout(8, dp_replicate=2, tp=2)
    assert found.data_size == 4
    assert [found.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [found.is_first_part(rank) for rank in range(8)] == [True, False] * 4
    pieces = layout(8, cp=2, tp=2)
    assert [pieces.data_rank(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert [pieces.is_first_of_samples(rank) for rank in range(8)] == [True, False, False, False] * 2
    assert [pieces.is_first_part(rank) for rank in range(8)] == [True, False] * 4
    assert [pieces.random_stream(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3], (
        "each piece has its own dropout"
    )
    gang = Gang(rank=5, world_size=8)
    assert gang.data_rank == 5
    gang.lay_out(found)
    assert gang.data_rank == 2


def test_a_gang_that_trains_many_runs_has_the_connections_of_one() -> None:
    device = torch.device("cpu")

    def lay_out(found: RankLayout) -> int:
        found.data_mesh(found.mesh(device))
        found.piece_mesh(device)
        found.expert_data_mesh(found.expert_mesh(device))
        return len(dist.distributed_c10d._world.pg_map)

    each: list[dict[str, int]] = [{"tp": 2}, {"tp": 2}, {"cp": 2, "ep": 2}, {"tp": 2}]
    counts: list[list[int]] = []
    for _ in range(2):  # another gang of the same process has groups of its own
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        try:
            counts.append([lay_out(layout(8, **keys)) for keys in each])
        finally:
            dist.destroy_process_group()
    first, again, other, last = counts[0]
    assert 1 < first == again < other == last
    assert counts[1] == counts[0]


def test_what_ranks_with_the_same_samples_have_counts_once() -> None:
    class Heard(Gang):
        """Says what it would send."""

        def sum(self, values: Any) -> list[float]:
            return list(values)

    for rank, sent in ((2, [3.0, 4.0]), (3, [0.0, 0.0])):
        gang = Heard(rank=rank, world_size=4)
        assert gang.sum_of_data([3.0, 4.0]) == [3.0, 4.0]
        gang.lay_out(layout(4, tp=2))
        assert gang.sum_of_data([3.0, 4.0]) == sent


DENSE = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96, "model_type": "qwen3"}
EXPERTS = {**DENSE, "num_experts": 6, "model_type": "qwen3_moe"}


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [(3, {"dp_replicate": 2}), (1, {"tp": 2}), (6, {"dp_replicate": 2, "tp": 2}), (6, {"cp": 4}), (1, {"cp": 2})],
)
def test_ranks_that_do_not_come_out_even_are_refused(tmp_path: Path, world_size: int, keys: dict[str, int]) -> None:
    found = refused(tmp_path, world_size, DENSE, **keys)
    assert found.keys() == keys.keys()
    assert all(message.startswith(f"{world_size} ranks cannot be laid out as") for message in found.values())


def test_what_ranks_cannot_share_is_refused_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    for keys in ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"cp": 8}):  # cp need not divide heads
        fit_layout(ModelLayoutConfig.model_validate(keys), tmp_path, world_size=8, prefix="model")
    found = refused(tmp_path, 6, DENSE, tp=6)
    assert "num_key_value_heads is 4, which 6 ranks cannot share" in found["tp"] and "a divisor of 4" in found["tp"]
    assert "has no experts" in refused(tmp_path, 2, DENSE, ep=2)["ep"]
    assert "6 experts in a layer, which 4 ranks" in refused(tmp_path, 4, EXPERTS, ep=4)["ep"]
    text_part = {"model_type": "qwen3_5_moe", "text_config": EXPERTS}
    assert "6 experts in a layer, which 4 ranks" in refused(tmp_path, 4, text_part, ep=4)["ep"]
    for key, other in (("tp", "apertus"), ("cp", "nemotron"), ("tp", "phi3"), ("cp", "gemma2")):
        told = refused(tmp_path, 2, {**DENSE, "model_type": other}, **{key: 2})
        assert told.keys() == {key} and "llama" in told[key] and f"only, not {other}: leave it out" in told[key]
    for key, proved in (("tp", "nemotron"), ("cp", "phi3"), ("tp", "llama")):
        (tmp_path / "config.json").write_text(json.dumps({**DENSE, "model_type": proved}))
        fit_layout(ModelLayoutConfig.model_validate({key: 2}), tmp_path, world_size=2, prefix="model")
    layers = ["linear_attention", "full_attention"]
    assert "layers of linear_attention" in refused(tmp_path, 2, {**DENSE, "layer_types": layers}, cp=2)["cp"]


def test_the_page_names_the_types_that_are_proved() -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    of_key = {key: set[str]() for key in ("tp", "cp", "ep")}
    for keys, types in re.findall(r"((?:`[tce]p`(?: and | only)?)+): ([a-z0-9_,\s]+)[.;]", page):
        for key in re.findall("`(..)`", keys):
            of_key[key] |= set(types.replace(",", " ").split())
    tried = set(families.EXPERTS.values())  # in tests/integration/trainer/test_families.py
    assert of_key == {"tp": set(fit.PROVED), "cp": set(context_parallel.PROVED), "ep": tried}


def test_all_contradictions_are_told_at_once(tmp_path: Path) -> None:
    model = {**EXPERTS, "layer_types": ["linear_attention"]}
    found = refused(tmp_path, 10, model, dp_replicate=2, cp=3, tp=5, ep=4)
    assert found.keys() == {"dp_replicate", "cp", "tp", "ep"}
    assert refused(tmp_path, 24, model, cp=2, tp=4, ep=4).keys() == {"ep", "cp"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"tp": 2, "lora": {"rank": 2}}}, "must be 1 with adapters"),
        ({"model": {"tp": 2, "dropout": True}}, "must be 1 with dropout"),
    ],
)
def test_what_tensor_parallelism_does_not_go_with(changes: dict[str, Any], message: str) -> None:
    orchestrator = {"env": [{"id": "e"}], "batch_size": 8, "rollouts_per_example": 4}
    with pytest.raises(InvalidSpecError, match=message) as caught:
        validate_document({"trainer": changes, "orchestrator": orchestrator}, RLConfig)
    assert caught.value.violations[0].field == "trainer.model.tp"
    if "dropout" not in changes["model"]:
        with pytest.raises(InvalidSpecError, match=message) as caught:
            validate_document(changes, SFTConfig)
        assert caught.value.violations[0].field == "model.tp"
