#!/usr/bin/env bash
# Regenerates proto/kvpb/v1/*_pb2*.py into the folder given (default: in place).
set -euo pipefail
cd "$(dirname "$0")"
"${PYTHON:-python}" -m grpc_tools.protoc -I. --python_out="${1:-.}" --pyi_out="${1:-.}" --grpc_python_out="${1:-.}" kvpb/v1/*.proto
