#!/usr/bin/env bash
# PEFT's ensure_weight_tying, the option that its warning about tied embeddings asks for, makes a merge add the update twice.
#
# Guess, written down before the run: a LoRA adapter on the embedding of a model with tied embeddings, merged with
#   merge_and_unload, gives the logits of the unmerged model; where PEFT warns that it may not, ensure_weight_tying=True helps.
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Behaviour: without the option (PEFT warns at both calls) the adapted layer alone has the update before the merge, and both
#   ends of the shared matrix have it afterwards. With the option both layers share one adapter and each of them is merged
#   into the one shared matrix: base + 2 * update, where the unmerged model computes with base + update. Nothing raises.
# Output ("of": the largest logit of the unmerged model):
#   q_proj                ensure_weight_tying=False  largest difference of logits 0.0000 of 0.71  merged - base = 1 x update
#   embed_tokens          ensure_weight_tying=False  largest difference of logits 2.4439 of 0.54  merged - base = 1 x update
#   lm_head               ensure_weight_tying=False  largest difference of logits 2.3102 of 1.14  merged - base = 1 x update
#   embed_tokens          ensure_weight_tying=True   largest difference of logits 2.3553 of 2.44  merged - base = 2 x update
#   lm_head               ensure_weight_tying=True   largest difference of logits 2.3553 of 2.44  merged - base = 2 x update
# Needs python3 >= 3.10, a download of PyTorch (0.2 GB for the CPU build, some GB for the CUDA build), no GPU.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$work"
HF_HUB_OFFLINE=1 TMPDIR="$work" "$work/venv/bin/python" -W ignore - <<'EOF'
import sys
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("peft", "transformers", "torch")))
IDS = torch.arange(1, 13)[None]


def base():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True)).eval()


@torch.no_grad()
def merge(target, tie):
    """The largest difference of logits by the merge, the largest logit before it, and how many times the update was added."""
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=[target], ensure_weight_tying=tie)).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.1)
    unmerged = model(IDS).logits
    name, layer = next((n, m) for n, m in model.named_modules() if n.endswith(target) and hasattr(m, "get_delta_weight"))
    update = layer.get_delta_weight("default").clone()
    merged = model.merge_and_unload()
    place = name.removeprefix("base_model.model.")
    added = merged.get_submodule(place).weight - base().get_submodule(place).weight
    times = ((added * update).sum() / (update * update).sum()).item()
    return (merged(IDS).logits - unmerged).abs().max().item(), unmerged.abs().max().item(), times


as_stated = True
for target, tie, expected in (
    ("q_proj", False, 1), ("embed_tokens", False, 1), ("lm_head", False, 1), ("embed_tokens", True, 2), ("lm_head", True, 2),
):
    difference, largest, times = merge(target, tie)
    shown = f"largest difference of logits {difference:.4f} of {largest:.2f}  merged - base = {times:.3g} x update"
    print(f"{target:<20}  ensure_weight_tying={tie!s:<5}  {shown}")
    right = difference < 1e-4 if target == "q_proj" else difference > 0.5
    as_stated &= right and abs(times - expected) < 1e-3
sys.exit(0 if as_stated else "the behaviour changed: see the header of this script for what it was")
EOF
