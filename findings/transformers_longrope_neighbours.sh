#!/usr/bin/env bash
# Transformers, rope_type "longrope" (Phi-3): a row's log-probs depend on its neighbour in the batch, and those that
# generate returns for one completion are computed with two sets of factors.
#
# Guess, written down before the run: a right-padded row has the log-probs that it has alone, and the logits that generate
#   returns are those of one forward call over prompt and completion.
# Versions: transformers 5.23.0, torch 2.13.0.
# Behaviour: the length of the longest row of a call chooses the short or the long factors, for all rows and positions. A short
#   row beside one of original_max_position_embeddings + 1 tokens has other log-probs. generate drops its cache where it
#   passes the border and recomputes the prefix with the long factors; what it returned until then is from the short ones.
#   One forward call, as a trainer makes it, agrees with it only behind the border, with the same weights and tokens.
# Output (original_max_position_embeddings = 32, a prompt of 20 tokens; largest differences of log-probs):
#   a row of 20 tokens, alone and beside a row of 32: 0.0000
#   a row of 20 tokens, alone and beside a row of 33: 0.3310
#   12 tokens by generate and by one forward call: the first 12 0.0000, the others 0.0000
#   24 tokens by generate and by one forward call: the first 13 0.1073, the others 0.0000
# Needs python3 >= 3.10, a download of PyTorch (0.2 GB for the CPU build, some GB for the CUDA build), no GPU.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$work"
HF_HUB_OFFLINE=1 TMPDIR="$work" TRANSFORMERS_VERBOSITY=error "$work/venv/bin/python" -W ignore - <<'EOF'
import sys
from importlib.metadata import version

import torch
from transformers import Phi3Config, Phi3ForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("transformers", "torch")))
BORDER, PROMPT = 32, 20
torch.manual_seed(0)
rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
config = Phi3Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=4 * BORDER, original_max_position_embeddings=BORDER, pad_token_id=0, eos_token_id=None,
    rope_parameters=rope | {"original_max_position_embeddings": BORDER},
)
model = Phi3ForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.data.mul_(5)  # else attention is so even in a random model that positions hardly matter


@torch.no_grad()
def logprobs(ids, mask):
    return model(ids, attention_mask=mask).logits.log_softmax(-1)


as_stated = True
row = torch.randint(1, 64, (1, PROMPT))
alone = logprobs(row, torch.ones_like(row))
for length in (BORDER, BORDER + 1):
    batch = torch.cat([torch.nn.functional.pad(row, (0, length - PROMPT)), torch.randint(1, 64, (1, length))])
    beside = logprobs(batch, (torch.arange(length) < torch.tensor([[PROMPT], [length]])).long())[:1, :PROMPT]
    difference = (beside - alone).abs().max().item()
    print(f"a row of {PROMPT} tokens, alone and beside a row of {length}: {difference:.4f}")
    as_stated &= difference < 1e-4 if length == BORDER else difference > 0.01
for new in (BORDER - PROMPT, 24):
    options = dict(do_sample=False, output_logits=True, return_dict_in_generate=True)
    made = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=new, **options)
    tokens = made.sequences[:, PROMPT:, None]
    once = logprobs(made.sequences, torch.ones_like(made.sequences))[:, PROMPT - 1 : -1].gather(-1, tokens)
    off = (torch.stack(made.logits, 1).log_softmax(-1).gather(-1, tokens) - once).abs().flatten()
    short = BORDER - PROMPT + 1  # the tokens that were sampled from at most BORDER tokens
    before, behind = off[:short].max().item(), off[short:].max().item() if new > short else 0.0
    print(f"{new} tokens by generate and by one forward call: the first {min(new, short)} {before:.4f}, the others {behind:.4f}")
    as_stated &= behind < 1e-4 and (before > 0.01 if new > short else before < 1e-4)
sys.exit(0 if as_stated else "the behaviour changed: see the header of this script for what it was")
EOF
