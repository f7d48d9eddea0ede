#!/usr/bin/env bash
# Makes bench/peers/venv-trl, the environment of the peer `trl`. Running it again changes nothing.
set -euo pipefail
cd "$(dirname "$0")"

# Any Python 3.11 or later will do; PYTHON=... chooses another than the one on the path.
[ -x venv-trl/bin/python ] || "${PYTHON:-python3}" -m venv venv-trl

# torch goes first and pinned: asked for by name alone, the others would bring the newest one with all of CUDA.
venv-trl/bin/python -m pip install --quiet "torch==2.13.0"
venv-trl/bin/python -m pip install --quiet \
  "torch==2.13.0" \
  "trl==1.16.0" \
  "transformers==5.22.2" \
  "accelerate==1.15.0" \
  "datasets==5.2.0" \
  "psutil==7.2.2"
venv-trl/bin/python -c 'import torch, transformers, trl; print(f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")'
