"""`millrace rl` with adapters, on both engines: learns, serves adapters, moves few bytes."""

from typing import Any

import pytest

from millrace.inference.vllm.lora import parse_adapter_config
from millrace.policies.manifest import PolicyManifest
from millrace_testing.workplaces import EXAMPLES

LORA = ["--trainer.model.lora.rank", "8", "--trainer.model.lora.alpha", "16.0", "--trainer.optim.lr", "3e-3"]


def _check(workplace: Any, summary: dict[str, Any], steps: int) -> None:
    """Version 0 in full, the others adapters on it; trainer and engine agree on what was sampled."""
    assert summary["steps"] == steps
    assert summary["max_abs_logprob_diff"] <= 1e-5
    root = (workplace.path / summary["checkpoint_path"]).parents[1]
    manifests = [
        PolicyManifest.from_bytes(path.read_bytes(), source=str(path))
        for path in sorted(root.glob("policies/*/manifest.json"))
    ]
    assert [manifest.version for manifest in manifests] == list(range(steps + 1))
    base = manifests[0]
    for manifest in manifests[1:]:
        assert manifest.adapter is not None and manifest.adapter.base_digest == base.digest
        assert manifest.size_bytes < 0.5 * base.size_bytes  # of a model of 124 288 parameters
    assert len({manifest.digest for manifest in manifests}) == steps + 1
    policy = workplace.path / summary["policy_path"]
    spec = parse_adapter_config((policy / "adapter_config.json").read_bytes(), source="policy")
    assert (spec.rank, spec.alpha) == (8, 16.0)
    assert (policy / "adapter_model.safetensors").is_file()


@pytest.mark.long  # tests/chaos/test_adapters.py trains some, too
@pytest.mark.timeout(300)
def test_adapters_learn_on_the_embedded_engine(warm: Any) -> None:
    summary, _ = warm.train("--max-steps", "5", "--orchestrator.eval.interval", "5", *LORA)
    _check(warm, summary, 5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_learn_on_real_vllm(vllm_python: str, make_workplace: Any) -> None:
    workplace = make_workplace("lora-vllm")
    place = "outputs/reverse-text"
    workplace.run(str(EXAMPLES / "make_model.py"), "--output", place, "--heads", "2")
    workplace.millrace("sft", "@", str(EXAMPLES / "sft.toml"), "--model.name", f"{place}/base")
    summary, _ = workplace.train(
        *("--inference", "@", str(EXAMPLES / "infer.toml"), "--max-steps", "4", "--orchestrator.eval.interval", "4"),
        *LORA,
        env={"MILLRACE_VLLM_PYTHON": vllm_python},
    )
    _check(workplace, summary, 4)
