#!/bin/sh
# Installs torch for cpu or cuda into the active environment. A CPU build comes from the given folder of wheels, or from
# the index that TORCH_INDEX_URL names; else the package index decides, which on PyPI means the CUDA build.
# usage: [TORCH_INDEX_URL=...] torch.sh cpu|cuda WHEELS
set -eu
case "$1" in
  cpu) wheel=$(find "$2" -name 'torch-*.whl' | head -n 1) ;;
  cuda) wheel=$(find "$2" -name 'torch-*.whl' ! -name '*+cpu*' | head -n 1) ;;
  *) echo "Error: build argument ACCELERATOR must be cpu or cuda, not '$1'" >&2; exit 2 ;;
esac
pip install --constraint constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "${wheel:-torch}"
build=$(python -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')
if [ "$1-$build" = cuda-cpu ]; then
  echo "Error: ACCELERATOR is cuda, but the index gave torch for CPUs" >&2
  exit 1
elif [ "$1-$build" = cpu-cuda ]; then
  echo "Warning: the index gave the CUDA build of torch; it works without a GPU, but makes the image gigabytes larger." >&2
  echo "Put a CPU wheel into docker/wheels, or set the build argument TORCH_INDEX_URL to PyTorch's index of CPU wheels." >&2
fi
