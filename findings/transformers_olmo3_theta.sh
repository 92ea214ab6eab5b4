#!/usr/bin/env bash
# transformers: the rope_theta of an OLMo 3 config of 4.x reaches the full-attention layers only.
#
# Guess, written down before the run: rope_theta in config.json is the base of every layer, as in the release that wrote it.
# Versions: transformers 5.23.0, torch 2.13.0.
# Behaviour: full_attention gets the file's 1000000, sliding_attention the class's default of 500000, without a word. Saved again,
#   the file says so; loaded again, it stays. Qwen3 and Gemma 2 with the same layer types give every layer the file's number.
# Output:
#   olmo3   sliding_attention: 500000   full_attention: 1000000
#   qwen3   one for all layers: 1000000
#   olmo3   lowest frequency of sliding layers is off by 1.68 times
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

from transformers import AutoConfig, AutoModelForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("transformers", "torch")))
THETA = 1000000.0
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, sliding_window=8, layer_types=["sliding_attention", "full_attention"], rope_theta=THETA,
    rope_scaling=None, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)


def read(model_type, architecture):
    place = Path(model_type)
    place.mkdir()
    (place / "config.json").write_text(json.dumps(dict(SIZES, model_type=model_type, architectures=[architecture])))
    return AutoConfig.from_pretrained(place)


olmo = read("olmo3", "Olmo3ForCausalLM")
bases = {name: rope["rope_theta"] for name, rope in olmo.rope_parameters.items()}
print("olmo3  ", "  ".join(f"{name}: {base:.0f}" for name, base in bases.items()))
qwen = read("qwen3", "Qwen3ForCausalLM").rope_parameters
print(f"qwen3   one for all layers: {qwen['rope_theta']:.0f}")
rotary = AutoModelForCausalLM.from_config(olmo).model.rotary_emb
off = float(rotary.sliding_attention_inv_freq[-1] / rotary.full_attention_inv_freq[-1])
print(f"olmo3   lowest frequency of sliding layers is off by {off:.2f} times")
as_stated = bases == {"sliding_attention": 500000.0, "full_attention": THETA} and qwen["rope_theta"] == THETA
as_stated &= off > 1.5
sys.exit(0 if as_stated else "the behaviour changed: see the header of this script for what it was")
EOF
