#!/usr/bin/env bash
# Makes .venv-templates, a directory for PYTHONPATH: public packages that ship real chat templates or make loss masks of
# them (requirements/templates.txt), and in llama.cpp the templates of llama-cpp-python's source. Idempotent and quick
# when nothing changed; 90 MB of downloads and a minute the first time.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MILLRACE_VENV:-.venv}/bin/python
target=.venv-templates
llama_cpp=llama-cpp-python==0.3.36

wanted=$({ cat requirements/templates.txt scripts/setup_templates.sh; "$python" --version; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$target/.millrace-setup" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi
echo "Setting up $target"
rm -rf "$target"
if ! "$python" -m uv pip install --quiet --no-deps --python "$python" --target "$target" --requirement requirements/templates.txt; then
  echo "Error: the packages of requirements/templates.txt did not install; the messages of uv above say why" >&2
  exit 5
fi
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
# A source package: pip makes its metadata, which needs scikit-build-core, but builds nothing.
"$python" -m pip --disable-pip-version-check download --quiet --no-deps --no-binary :all: --dest "$downloads" "$llama_cpp"
tar -xzf "$downloads"/*.tar.gz -C "$downloads" --wildcards '*/vendor/llama.cpp/models/templates/*.jinja'
mkdir "$target/llama.cpp"
mv "$downloads"/*/vendor/llama.cpp/models/templates/*.jinja "$target/llama.cpp"
echo "$wanted" > "$target/.millrace-setup"
