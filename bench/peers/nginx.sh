#!/usr/bin/env bash
# Makes bench/peers/venv-nginx: the peer `nginx`, which also plays the light workers. Running it again changes nothing.
set -euo pipefail
cd "$(dirname "$0")"
bash debian.sh nginx nginx
venv-nginx/usr/sbin/nginx -v 2>&1
