#!/usr/bin/env bash
# debian.sh NAME PACKAGE...: unpacks Debian packages into bench/peers/venv-NAME, for nginx.sh, haproxy.sh and wrk.sh.
# Nothing is installed on the machine, so no root is needed; libraries that the machine lacks are named among PACKAGE.
set -euo pipefail
cd "$(dirname "$0")"
name=$1
shift

if [ ! -e "venv-$name/complete" ]; then
  folder=$PWD/venv-$name
  downloads=$(mktemp -d)
  trap 'rm -rf "$downloads"' EXIT
  mkdir -p "$folder"
  # As root apt drops its rights for the download and complains if it then cannot write.
  chmod 755 "$downloads"
  (
    cd "$downloads"
    # The list of packages may be old or missing; refreshing it takes root.
    apt-get download --quiet=2 "$@" 2>/dev/null || { apt-get update --quiet=2 && apt-get download --quiet=2 "$@"; }
    for package in *.deb; do dpkg-deb -x "$package" "$folder"; done
  )
  touch "$folder/complete"
fi
