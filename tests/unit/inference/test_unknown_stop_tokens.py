"""Stop tokens that the model does not have: they end nothing, least of all the engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import EngineState, FinishReason, GenerateRequest, PolicyIdentity, SamplingParams


async def test_a_stop_token_beyond_the_vocabulary_does_not_fail_the_engine(
    model_dir: Path, make_model: Callable[[int], Any], make_staged: Callable[[Any], Any]
) -> None:
    """With `min_tokens` the logits of stop tokens are taken away; an index beyond them would fail everybody's pass."""
    engine = EmbeddedEngine(max_num_seqs=4)
    identity = PolicyIdentity(run_uid="r", lineage=0, version=0)
    await engine.load(model_dir, make_staged(make_model(0)), identity=identity)
    sampling = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(1_000_000, 7), temperature=0.0)
    found = await engine.generate(GenerateRequest(request_id="a", prompt_token_ids=(1, 2, 3), sampling=sampling))
    assert found.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and len(found.token_ids) >= 2
    assert engine.status().state is EngineState.READY
    await engine.close()
