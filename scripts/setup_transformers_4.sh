#!/usr/bin/env bash
# Makes .venv-transformers-4, a directory for PYTHONPATH: the last release of transformers 4
# (requirements/transformers-4.txt). Idempotent and quick when nothing changed; 15 MB of downloads the first time.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MILLRACE_VENV:-.venv}/bin/python
target=.venv-transformers-4
pins=requirements/transformers-4.txt

wanted=$({ cat "$pins" scripts/setup_transformers_4.sh; "$python" --version; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$target/.millrace-setup" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi
echo "Setting up $target"
rm -rf "$target"
if ! "$python" -m uv pip install --quiet --no-deps --python "$python" --target "$target" --requirement "$pins"; then
  echo "Error: the packages of $pins did not install; the messages of uv above say why" >&2
  exit 5
fi
echo "$wanted" > "$target/.millrace-setup"
