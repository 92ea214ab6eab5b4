#!/usr/bin/env bash
# Runs what depends on torch and transformers with other releases of them than constraints.txt has, in an environment of
# its own, .venv-torch-RELEASE: unit and contract tests, those of the trainer and the engines, and the table of layouts.
# PyPI's torch for Linux is built for CUDA and runs on CPUs, too: 3 GB of downloads, 6.5 GB of disk, an hour on two cores.
# usage: scripts/test_torch.sh TORCH TRANSFORMERS   for instance 2.15.0 5.24.0
set -euo pipefail
cd "$(dirname "$0")/.."
torch=$1
transformers=$2
export MILLRACE_VENV=.venv-torch-$torch
own=$(mktemp)
trap 'rm -f "$own"' EXIT
grep -vE '^(torch|transformers|tokenizers)==' constraints.txt > "$own"
printf 'torch==%s\ntransformers==%s\n' "$torch" "$transformers" >> "$own"
MILLRACE_CONSTRAINTS=$own scripts/setup.sh dev
python=$MILLRACE_VENV/bin/python
"$python" -c 'import torch, transformers; print(f"torch {torch.__version__}, transformers {transformers.__version__}")'
left_out="not long and not presets and not slow and not gpu and not vllm and not vllm_wheels and not environments and not templates and not models and not stores and not compose and not browser"
"$python" -m pytest tests/unit tests/contract tests/integration/trainer tests/integration/inference tests/integration/policies \
  -n "${TEST_JOBS:-4}" --dist loadfile -m "$left_out"
"$python" -m millrace_testing.trainer.equality dense moe
