#!/usr/bin/env bash
# PEFT: modules_to_save matches the end of a module's name letter by letter, target_modules matches whole components.
#
# Guess, written down before the run: both match whole dotted components, so that "norm" is model.norm and not input_layernorm.
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0.
# Behaviour: modules_to_save=["norm"] copies, trains and saves every module whose name ends in these letters: all layer norms
#   of a Llama, not only the last one. target_modules=["proj"] in the same config matches nothing and raises. A word that
#   matches nothing raises in target_modules and is dropped silently in modules_to_save.
# Output (a Llama of two layers; the first line is shortened):
#   target_modules=['q_proj'] modules_to_save=['norm'] -> model.layers.0.input_layernorm (... all five norms) model.norm
#   target_modules=['q_proj'] modules_to_save=['model.norm'] -> model.norm
#   target_modules=['q_proj'] modules_to_save=['nrom'] -> no module is trained whole
#   target_modules=['proj'] -> Target modules {'proj'} not found in the base model
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

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("peft", "transformers", "torch")))
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def matched(**lists):
    """The modules of a fresh model that are trained whole, or the error's message."""
    try:
        model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)), LoraConfig(r=4, **lists))
    except ValueError as error:
        shown = str(error).split(".")[0]
    else:
        ending = ".modules_to_save.default.weight"
        names = [name.removeprefix("base_model.model.") for name, p in model.named_parameters() if p.requires_grad]
        shown = " ".join(name.removesuffix(ending) for name in names if name.endswith(ending)) or "no module is trained whole"
    print(*(f"{name}={value}" for name, value in lists.items()), "->", shown)
    return shown


norms = [f"model.layers.{layer}.{side}_layernorm" for layer in (0, 1) for side in ("input", "post_attention")]
as_stated = matched(target_modules=["q_proj"], modules_to_save=["norm"]).split() == [*norms, "model.norm"]
as_stated &= matched(target_modules=["q_proj"], modules_to_save=["model.norm"]) == "model.norm"
as_stated &= matched(target_modules=["q_proj"], modules_to_save=["nrom"]) == "no module is trained whole"
as_stated &= "not found" in matched(target_modules=["proj"])
sys.exit(0 if as_stated else "the behaviour changed: see the header of this script for what it was")
EOF
