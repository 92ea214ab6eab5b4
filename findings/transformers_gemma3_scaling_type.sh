#!/usr/bin/env bash
# transformers: Gemma 3 loses a RoPE scaling that is written with the older key "type", which every other family reads.
#
# Guess, written down before the run: {"type": "linear", "factor": 8.0} of a 4.x config.json means the same for all families, and
#   for Gemma 3 it means what {"rope_type": "linear", "factor": 8.0} does.
# Versions: transformers 5.23.0, torch 2.13.0.
# Behaviour: llama, qwen3 and gemma2 read both spellings alike. gemma3_text keeps "type" as an unknown key beside
#   rope_type "default": full-attention layers are not scaled, and the same weights give other logits. A log line names "factor".
# Output:
#   llama        type: linear   rope_type: linear
#   qwen3        type: linear   rope_type: linear
#   gemma2       type: linear   rope_type: linear
#   gemma3_text  type: default  rope_type: linear
#   gemma3_text  largest difference of logits over 64 tokens: 0.1 or more
# Needs python3 >= 3.10, a download of PyTorch (0.2 GB for the CPU build, some GB for the CUDA build), no GPU.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$work"
HF_HUB_OFFLINE=1 TMPDIR="$work" "$work/venv/bin/python" -W ignore - <<'EOF'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("transformers", "torch")))
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=256, rope_theta=1000000.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
NAMES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}


def read(model_type, spelling):
    """What is read of a config.json as 4.x wrote it."""
    own = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8) if model_type == "gemma3_text" else {}
    text = dict(SIZES, model_type=model_type, architectures=[NAMES[model_type]], rope_scaling={spelling: "linear", "factor": 8.0}, **own)
    place = Path(f"{model_type}-{spelling}")
    place.mkdir()
    (place / "config.json").write_text(json.dumps(text))
    return AutoConfig.from_pretrained(place)


def kind(config):
    rope = config.rope_parameters
    return rope.get("full_attention", rope)["rope_type"]


as_stated = True
for name in NAMES:
    kinds = [kind(read(name, spelling)) for spelling in ("type", "rope_type")]
    print(f"{name:12} type: {kinds[0]:8} rope_type: {kinds[1]}")
    as_stated &= kinds == (["default", "linear"] if name == "gemma3_text" else ["linear", "linear"])
logits = []
for spelling in ("type", "rope_type"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"gemma3_text-{spelling}")).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        logits.append(model(torch.arange(64)[None] % 60 + 3).logits)
gap = float((logits[0] - logits[1]).abs().max())
print(f"gemma3_text  largest difference of logits over 64 tokens: {gap:.3f}")
as_stated &= gap >= 0.1
sys.exit(0 if as_stated else "the behaviour changed: see the header of this script for what it was")
EOF
