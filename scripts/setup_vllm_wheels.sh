#!/usr/bin/env bash
# Makes .venv-vllm-wheels: the sources of every release of vLLM that Millrace says it runs on, out of the wheels for GPUs,
# to be read, not run. Idempotent and quick when nothing changed; 350 MB of downloads and 50 MB of disk each.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MILLRACE_VENV:-.venv}/bin/python
target=.venv-vllm-wheels

mkdir -p "$target"
for release in $("$python" -c 'from millrace.inference.vllm.releases import TRIED; print(*TRIED)'); do
  if [ -f "$target/$release/vllm/_version.py" ]; then
    continue
  fi
  echo "Getting the sources of vLLM $release"
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  if ! "$python" -m pip --disable-pip-version-check download --quiet --quiet --no-deps --only-binary :all: \
    --platform manylinux_2_28_x86_64 --dest "$wheels" "vllm==$release"; then
    echo "Error: there is no wheel of vllm==$release; the messages of pip above say why" >&2
    exit 5
  fi
  "$python" - "$wheels"/vllm-*.whl "$target/$release.new" <<'END'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])
END
  rm -rf "$wheels" "${target:?}/$release"
  mv "$target/$release.new" "$target/$release"
done
