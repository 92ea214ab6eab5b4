#!/usr/bin/env bash
# PEFT: an adapter begun with the fast PiSSA ("pissa_niter_4") and saved comes back as another model.
#
# Guess, written down before the run: save_pretrained and PeftModel.from_pretrained give the same logits, to rounding.
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Behaviour: PiSSA takes the largest singular directions out of the frozen weights. The saved config keeps
#   init_lora_weights, so loading takes them out anew, by a randomised SVD from PyTorch's global generator: A and B are the
#   saved ones, the frozen rest is not the one that they were trained beside. Nothing warns. The error is as large as what
#   the noise changed; it shrinks as the singular values fall off faster. With the generator seeded as
#   before the first call, and with the exact "pissa", the model comes back.
# Output ("moved": what stands in for training, noise on B, changed the logits by):
#   flat spectrum  True other seed          moved 0.0945  reloaded differs by 0.0000  same A and B: True
#   flat spectrum  pissa other seed         moved 0.0980  reloaded differs by 0.0000  same A and B: True
#   flat spectrum  pissa_niter_4 same seed  moved 0.1189  reloaded differs by 0.0000  same A and B: True
#   flat spectrum  pissa_niter_4 other seed moved 0.1189  reloaded differs by 0.2749  same A and B: True
#   and with singular values that fall as k ** -0.5:
#   k ** -0.5      pissa_niter_4 other seed moved 0.1144  reloaded differs by 0.1178  same A and B: True
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
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("peft", "transformers", "torch")))
IDS = torch.arange(1, 13)[None]


@torch.no_grad()
def base(decay):
    """A random model; the k-th singular value of its projections is proportional to k ** -decay (0: as initialised)."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    for name, weight in model.named_parameters():
        if decay and "proj" in name:
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            shape = torch.arange(1.0, len(s) + 1) ** -decay
            weight.copy_(u * (shape * s.norm() / shape.norm()) @ v)
    return model


@torch.no_grad()
def reload(decay, init, seed):
    """How far noise moved the logits, how far the reloaded model is off, and whether A and B are the saved ones."""
    untouched = base(decay)(IDS).logits
    frozen = base(decay)
    torch.manual_seed(5)
    model = get_peft_model(frozen, LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", init_lora_weights=init)).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.add_(torch.randn_like(parameter) * 0.02)
    saved = model(IDS).logits
    model.save_pretrained("adapter")
    frozen = base(decay)
    torch.manual_seed(seed)
    again = PeftModel.from_pretrained(frozen, "adapter").eval()
    pairs = zip(model.named_parameters(), again.named_parameters(), strict=True)
    same = all(torch.equal(one, two) for (name, one), (_, two) in pairs if "lora_" in name)
    return (saved - untouched).abs().max().item(), (again(IDS).logits - saved).abs().max().item(), same


as_stated = True
for decay, spectrum in ((0, "flat spectrum"), (0.5, "k ** -0.5")):
    for init, seed, differs in ((True, 2, False), ("pissa", 2, False), ("pissa_niter_4", 5, False), ("pissa_niter_4", 2, True)):
        moved, off, same = reload(decay, init, seed)
        label = f"{init} {'same seed' if seed == 5 else 'other seed'}"
        print(f"{spectrum:<14} {label:<24} moved {moved:.4f}  reloaded differs by {off:.4f}  same A and B: {same}")
        as_stated &= same and (off > 0.01 if differs else off < 1e-4)
sys.exit(0 if as_stated else "the behaviour changed: see the header of this script for what it was")
EOF
