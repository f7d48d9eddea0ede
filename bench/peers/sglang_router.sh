#!/usr/bin/env bash
# Makes bench/peers/venv-sglang_router, the environment of the peer `sglang_router`. Running it again changes nothing.
set -euo pipefail
cd "$(dirname "$0")"

[ -x venv-sglang_router/bin/python ] || "${PYTHON:-python3}" -m venv venv-sglang_router
venv-sglang_router/bin/python -m pip install --quiet "sglang-router==0.3.2"
venv-sglang_router/bin/python -c 'from importlib.metadata import version; print("sglang-router", version("sglang-router"))'
