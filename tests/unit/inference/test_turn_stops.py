"""The embedded engine ends a turn where the chat template does, whatever the tokenizer calls the end of a text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import FinishReason, GenerateRequest, PolicyIdentity, SamplingParams
from millrace_testing.inference.tiny import END, tiny_config, tiny_tokenizer


async def test_the_templates_end_of_a_turn_ends_a_completion(
    model_dir: Path, make_model: Callable[[int], Any], make_staged: Callable[[Any], Any], tmp_path: Path
) -> None:
    engine, identity = EmbeddedEngine(max_num_seqs=1), PolicyIdentity(run_uid="r", lineage=0, version=0)
    staged = make_staged(make_model(0))
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id="a", prompt_token_ids=(1, 2, 3), sampling=sampling)
    await engine.load(model_dir, staged, identity=identity)
    first = int((await engine.generate(request)).token_ids[0])
    tiny_config(eos_token_id=256).save_pretrained(tmp_path)
    _tokenizer_with_end(first).save_pretrained(tmp_path)
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    request = GenerateRequest(request_id="b", prompt_token_ids=(1, 2, 3), sampling=sampling)
    await engine.load(tmp_path, staged, identity=identity)
    found = await engine.generate(request)
    await engine.close()
    assert (found.finish_reason, found.token_ids.tolist()) == (FinishReason.STOP, [first])


def _tokenizer_with_end(end: int) -> PreTrainedTokenizerFast:
    """Return a base checkpoint's: its template ends turns with the token `end`, and its texts end with another one."""
    made = tiny_tokenizer()
    vocabulary: dict[str, int] = made.get_vocab()
    other = next(symbol for symbol, index in vocabulary.items() if index == end)
    vocabulary |= {other: vocabulary[END], END: end}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = made.backend_tokenizer.pre_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", END],
        chat_template=made.chat_template,
    )
