#!/usr/bin/env bash
# Makes bench/peers/venv-haproxy, the peer `haproxy`. Running it again changes nothing.
set -euo pipefail
cd "$(dirname "$0")"
bash debian.sh haproxy haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1
export LD_LIBRARY_PATH="$PWD/venv-haproxy/usr/lib/$(uname -m)-linux-gnu"
venv-haproxy/usr/sbin/haproxy -v | head -n 1
