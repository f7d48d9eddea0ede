#!/usr/bin/env bash
# Makes bench/peers/venv-wrk, the load generator of `python -m bench router`. Running it again changes nothing.
set -euo pipefail
cd "$(dirname "$0")"
bash debian.sh wrk wrk libluajit-5.1-2 libluajit-5.1-common
export LD_LIBRARY_PATH="$PWD/venv-wrk/usr/lib/$(uname -m)-linux-gnu"
{ venv-wrk/usr/bin/wrk --version || true; } | head -n 1 # it ends with 1 after telling its version
