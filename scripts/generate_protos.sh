#!/usr/bin/env bash
# Regenerates services/millrace/{v1,internal/v1}/*_pb2* from proto/, with the pinned grpcio-tools.
# usage: scripts/generate_protos.sh [output directory, default services]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-services}
mapfile -t files < <(find proto -name '*.proto' | sort)
.venv/bin/python -m grpc_tools.protoc -Iproto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" "${files[@]}"
