#!/usr/bin/env bash
# The whole story on one machine without a GPU: tiny model, SFT warm-up, RL on reverse-text. `make demo` calls it.
# ENGINE=vllm samples with real vLLM, in an environment of its own (.venv-vllm, made when it is missing).
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE
place=outputs/reverse-text
make=() warm_up=() train=()
case ${ENGINE:-embedded} in
  embedded) ;;
  vllm)
    scripts/setup_vllm.sh
    place=outputs/reverse-text-vllm
    make=(--output $place --heads 2) # vLLM's attention on a CPU begins at heads of 32 numbers
    warm_up=(--output-dir $place --model.name $place/base --data.name $place/sft.jsonl)
    train=(--model.name $place/sft/model --inference @ examples/reverse_text/infer.toml)
    ;;
  *)
    echo "Error: ENGINE is $ENGINE; it is embedded or vllm" >&2
    exit 2
    ;;
esac
# make_model.py writes the pairs last; the model is asked for as well, in case somebody removed it.
[ -f $place/base/config.json ] && [ -f $place/sft.jsonl ] ||
  .venv/bin/python examples/reverse_text/make_model.py ${make[@]+"${make[@]}"}
.venv/bin/millrace sft @ examples/reverse_text/sft.toml ${warm_up[@]+"${warm_up[@]}"}
exec .venv/bin/millrace rl @ examples/reverse_text/rl.toml ${train[@]+"${train[@]}"} "$@"
