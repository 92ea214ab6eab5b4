#!/usr/bin/env bash
# Transformers, rope_type "dynamic": the logits of a row depend on what the process computed before it.
#
# Guess, written down before the run: the logits of a row depend on the row only; a forward call keeps nothing.
# Versions: transformers 5.23.0, torch 2.13.0.
# Behaviour: the rotary embedding keeps the frequencies of the longest call until a call is *shorter* than
#   max_position_embeddings. So a row of exactly that length, which needs no scaling, and every longer row have other logits
#   after a longer call than before it: two processes with the same weights can disagree about one row, and a restarted one
#   with itself. A short call in between puts it right.
# Output (max_position_embeddings = 32; the longer call has 96 tokens; largest differences of log-probs):
#   31 tokens: called twice 0.0000, after a longer call 0.0000, after a longer and a short call 0.0000
#   32 tokens: called twice 0.0000, after a longer call 0.2257, after a longer and a short call 0.0000
#   33 tokens: called twice 0.0000, after a longer call 0.1569, after a longer and a short call 0.0000
#   48 tokens: called twice 0.0000, after a longer call 0.1846, after a longer and a short call 0.0000
# Needs python3 >= 3.10, a download of PyTorch (0.2 GB for the CPU build, some GB for the CUDA build), no GPU.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$work"
HF_HUB_OFFLINE=1 TMPDIR="$work" "$work/venv/bin/python" -W ignore - <<'EOF'
import sys
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("transformers", "torch")))
LIMIT = 32
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=LIMIT, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
)
model = LlamaForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.data.mul_(5)  # else attention is so even in a random model that positions hardly matter
SHORT, LONG = torch.randint(0, 64, (1, LIMIT - 1)), torch.randint(0, 64, (1, 3 * LIMIT))


@torch.no_grad()
def after(row, *calls):
    """The log-probs of a row after other calls."""
    for call in calls:
        model(call)
    return model(row).logits.log_softmax(-1)


as_stated = True
for length in (LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 16):
    row = torch.randint(0, 64, (1, length))
    first = after(row, SHORT)
    twice, longer, put_right = (
        (after(row, *calls) - first).abs().max().item() for calls in ((), (LONG,), (LONG, SHORT))
    )
    shown = f"called twice {twice:.4f}, after a longer call {longer:.4f}, after a longer and a short call {put_right:.4f}"
    print(f"{length} tokens: {shown}")
    as_stated &= twice < 1e-5 and put_right < 1e-5 and (longer < 1e-5 if length < LIMIT else longer > 0.01)
sys.exit(0 if as_stated else "the behaviour changed: see the header of this script for what it was")
EOF
