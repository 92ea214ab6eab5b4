#!/bin/sh
# Installs torch for cpu or cuda into the active environment; wheels in the given folder come first.
# usage: torch.sh cpu|cuda WHEELS
set -eu
case "$1" in
  cpu | cuda) ;;
  *) echo "Error: build argument ACCELERATOR must be cpu or cuda, not '$1'" >&2; exit 2 ;;
esac
wheel=$(find "$2" -name 'torch-*.whl' | head -n 1)
pip install --constraint constraints.txt --find-links "$2" "${wheel:-torch}"
build=$(python -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')
if [ "$build" != "$1" ]; then
  echo "Error: ACCELERATOR is $1, but the index and docker/wheels gave torch for $build; see docker/wheels/README.md" >&2
  exit 1
fi
