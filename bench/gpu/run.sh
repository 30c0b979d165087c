#!/usr/bin/env bash
# Run the GPU benchmarks, at most 15 minutes on one H100. The last lines are a table with all goals.
#   bench/gpu/run.sh            # needs a CUDA device and the GPU set-up of the Makefile
#   bench/gpu/run.sh --tiny     # the same code with small shapes, to try the script on any machine
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" -m bench.gpu "$@"
