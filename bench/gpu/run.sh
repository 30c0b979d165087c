#!/usr/bin/env bash
# The GPU part of the benchmarks: one JSON line each, kept in bench/results/gpu_*.jsonl.
#   bench/gpu/run.sh            # needs a CUDA device and the GPU set-up of the Makefile
#   bench/gpu/run.sh --tiny     # the same code on whatever is here, with small shapes: to try the script
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
"$python" -m bench.gpu.engines "$@"
if ! "$python" -c 'import transformers, pydantic, safetensors, psutil' 2>/dev/null; then
  echo "skipped: training, which needs transformers, pydantic, safetensors and psutil"
  exit 0
fi
exec "$python" -m bench.gpu.train "$@"
