#!/usr/bin/env bash
# The whole story on one machine without a GPU: tiny model, SFT warm-up, RL on reverse-text. `make demo` calls it.
# ENGINE=vllm samples with real vLLM, in an environment of its own (.venv-vllm, made when it is missing).
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE
# make_model.py writes the pairs last; the model is asked for as well, in case somebody removed it.
[ -f outputs/reverse-text/base/config.json ] && [ -f outputs/reverse-text/sft.jsonl ] ||
  .venv/bin/python examples/reverse_text/make_model.py
.venv/bin/millrace sft @ examples/reverse_text/sft.toml
engine=()
if [ "${ENGINE:-embedded}" = vllm ]; then
  scripts/setup_vllm.sh
  engine=(--inference @ examples/reverse_text/infer.toml)
elif [ "${ENGINE:-embedded}" != embedded ]; then
  echo "Error: ENGINE is $ENGINE; it is embedded or vllm" >&2
  exit 2
fi
exec .venv/bin/millrace rl @ examples/reverse_text/rl.toml ${engine[@]+"${engine[@]}"} "$@"
