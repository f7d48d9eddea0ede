#!/usr/bin/env bash
# Makes bench/peers/venv-verl, the environment of the peer `verl`. Running it again changes nothing.
set -euo pipefail
cd "$(dirname "$0")"

# Any Python 3.11 or later will do; PYTHON=... chooses another than the one on the path.
[ -x venv-verl/bin/python ] || "${PYTHON:-python3}" -m venv venv-verl

# torch goes first and pinned: asked for by name alone, the others would bring the newest one with all of CUDA.
venv-verl/bin/python -m pip install --quiet "torch==2.13.0"
# Without its dependencies: only its worker groups, its router and its reward loop are measured, and what those import is
# listed here.
venv-verl/bin/python -m pip install --quiet --no-deps "verl==0.9.1"
venv-verl/bin/python -m pip install --quiet \
  "torch==2.13.0" \
  "ray==2.60.0" \
  "tensordict==0.15.3" \
  "transformers==5.22.2" \
  "omegaconf" "hydra-core" "codetiming" "psutil==7.2.2" "packaging" "numpy" \
  "orjson==3.13.0" "sympy" \
  "fastapi==0.162.4" "uvicorn==0.54.0" "aiohttp==3.14.5" "uvloop==0.23.0" "httptools==0.9.0"
# Without theirs as well: they ask for an antlr that omegaconf cannot read its own files with.
venv-verl/bin/python -m pip install --quiet --no-deps "math-verify==0.9.0" "latex2sympy2_extended==1.11.0"
venv-verl/bin/python -c 'import verl, math_verify; from verl.single_controller.ray import RayWorkerGroup; print("verl", verl.__version__)'
