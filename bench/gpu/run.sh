#!/usr/bin/env bash
# Run the GPU benchmarks. Each appends one JSON line to bench/results/gpu_*.jsonl.
#   bench/gpu/run.sh            # needs a CUDA device and the GPU set-up of the Makefile
#   bench/gpu/run.sh --tiny     # the same code with small shapes, to try the script on any machine
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
"$python" -m bench.gpu.engines "$@"
if ! "$python" -c 'import transformers, pydantic, safetensors, psutil' 2>/dev/null; then
  echo "skipped: training, which needs transformers, pydantic, safetensors and psutil"
  exit 0
fi
exec "$python" -m bench.gpu.train "$@"
