#!/usr/bin/env bash
# Makes .venv-tinker: the public Tinker SDK (requirements/tinker.txt) in a virtual environment of its own, which finds torch
# in .venv. Idempotent and quick when nothing changed; 60 MB of downloads and a minute the first time.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MILLRACE_VENV:-.venv}/bin/python
target=.venv-tinker

wanted=$({ cat requirements/tinker.txt scripts/setup_tinker.sh; "$python" --version; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$target/.millrace-setup" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi
echo "Setting up $target: $(grep -c '==' requirements/tinker.txt) packages"
rm -rf "$target"
"$python" -m uv venv --quiet --python "$python" "$target"
if ! "$python" -m uv pip install --quiet --no-deps --python "$target/bin/python" --requirement requirements/tinker.txt; then
  echo "Error: the packages of requirements/tinker.txt did not install; the messages of uv above say why" >&2
  exit 5
fi
# After its own packages it looks into .venv: losses of a client's own need torch.
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$site" > "$("$target/bin/python" -c "$site")/after.pth"
echo "$wanted" > "$target/.millrace-setup"
