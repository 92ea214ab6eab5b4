"""Families whose weights vLLM takes in ways of their own: as they are saved, as policies, and after a delta."""

from typing import Any

import pytest
import torch

from millrace_testing.inference.vllm_families import Job, formats_of, make_job, on_vllm, problems_of

pytestmark = pytest.mark.timeout(700)

FAMILIES = {
    "qwen3, tied": "the embedding is the head",
    "qwen3_moe": "experts that transformers fuses",
    "glm4_moe": "a router whose bias stays float32",
    "gpt_oss": "its loader copies transposed experts past vLLM's reload",
    "phi": "transformers runs it, and its head's bias is registered while it loads",
}


@pytest.fixture(scope="module")
def found(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, dict[str, Any]]]:
    """Return what vLLM found of each, one after the other in one process."""
    directory = tmp_path_factory.mktemp("families")
    jobs = [make_job(name, directory / name, dtype=formats_of(name)[-1]) for name in FAMILIES]
    answers = on_vllm(jobs, directory, python=vllm_python)
    return {job.name: (job, answer) for job, answer in zip(jobs, answers, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_on_vllm_what_it_says_with_transformers(
    found: dict[str, tuple[Job, dict[str, Any]]], family: str
) -> None:
    job, answer = found[family]
    assert not problems_of(job, answer)
    first, _, changed, _ = job.wanted
    assert float((changed - first).abs().max()) > 0.5, "the delta would be missed"


def test_what_stays_float32_is_told_apart(found: dict[str, tuple[Job, dict[str, Any]]]) -> None:
    job, _ = found["glm4_moe"]
    kept = {entry.name for entry in job.manifests[0].tensors if entry.dtype == "float32"}
    assert job.dtype == torch.bfloat16 and {name.rpartition(".")[2] for name in kept} == {"e_score_correction_bias"}
