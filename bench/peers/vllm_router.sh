#!/usr/bin/env bash
# Makes bench/peers/venv-vllm_router, the environment of the peer `vllm_router`. Running it again changes nothing.
set -euo pipefail
cd "$(dirname "$0")"

[ -x venv-vllm_router/bin/python ] || "${PYTHON:-python3}" -m venv venv-vllm_router
venv-vllm_router/bin/python -m pip install --quiet "vllm-router==0.1.16"
venv-vllm_router/bin/python -c 'from importlib.metadata import version; print("vllm-router", version("vllm-router"))'
