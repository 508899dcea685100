#!/usr/bin/env bash
# Cuts the power under a running eval, again and again, and counts what is left. As root, on Debian or Ubuntu:
#   bench/power_loss.sh [--rounds 5] [--seed N]
# A Linux kernel runs as an ordinary process (package user-mode-linux); power_loss.py says the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if [ "$(id -u)" != 0 ]; then echo "power_loss.sh: mounting a disk image takes root" >&2; exit 2; fi
command -v linux.uml >/dev/null && command -v mkfs.ext4 >/dev/null || {
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq user-mode-linux e2fsprogs >/dev/null
}
exec "$(command -v "$python")" bench/power_loss.py "$@"
