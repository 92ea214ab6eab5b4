"""Log-probs of given tokens: equal to one plain forward pass, however they are cut into chunks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.errors import InvalidSpecError
from millrace.inference.embedded import loader
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import PolicyIdentity, PromptScores
from millrace.inference.http.responses import prompt_logprobs
from millrace_testing.inference.logprobs import prompt_logprobs as plain_logprobs

TOKENS = tuple(int(token) for token in np.random.default_rng(0).integers(0, 256, 61))


@pytest.mark.parametrize("chunk", [1, 7, 60, 512])
def test_chunks_give_what_one_forward_pass_gives(chunk: int, make_model, monkeypatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_TOKENS", chunk)
    model = make_model(3)
    found = loader.score_prompt(model, TOKENS)
    assert found.logprobs.shape == (60,) and found.logprobs.dtype == np.float32
    assert np.allclose(found.logprobs, plain_logprobs(model, TOKENS), atol=2e-6)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0, :-1]
    own = logits.gather(-1, torch.tensor(TOKENS[1:])[:, None])
    assert found.ranks.tolist() == ((logits > own).sum(-1) + 1).tolist()


async def test_the_engine_scores_what_it_holds_and_refuses_strange_tokens(
    model_dir: Path, make_model, make_staged
) -> None:
    engine = EmbeddedEngine()
    try:
        await engine.load(
            model_dir, make_staged(make_model(0)), identity=PolicyIdentity(run_uid="", lineage=0, version=0)
        )
        found = await engine.score(TOKENS)
        assert np.allclose(found.logprobs, loader.score_prompt(make_model(0), TOKENS).logprobs, atol=2e-6)
        assert len((await engine.score((5,))).logprobs) == 0
        with pytest.raises(InvalidSpecError, match="token ids are 0 to 271"):
            await engine.score((1, 272))
    finally:
        await engine.close()


def test_minus_infinity_is_written_as_vllm_writes_it() -> None:
    scores = PromptScores(logprobs=np.array([-0.5, -np.inf], np.float32), ranks=np.array([1, 9], np.int32))
    assert prompt_logprobs([7, 8, 9], scores, None) == [
        None,
        {"8": {"logprob": -0.5, "rank": 1, "decoded_token": None}},
        {"9": {"logprob": -9999.0, "rank": 9, "decoded_token": None}},
    ]
