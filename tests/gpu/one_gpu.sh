#!/usr/bin/env bash
# Shows in under nine minutes what parbench does on a machine with one NVIDIA GPU, without a network; see README.md.
#   tests/gpu/one_gpu.sh [--rehearse] [FOLDER]     PYTHON=... names the Python whose torch is meant
set -u
here=$(cd "$(dirname "$0")" && pwd)
for python in "${PYTHON:-}" python3 python /opt/*/.venv/bin/python3; do
  if [ -n "$python" ] && "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' 2>/dev/null
  then exec "$python" "$here/one_gpu.py" "$@"
  fi
done
echo "one_gpu.sh: no Python here has torch; name one that has: PYTHON=/path/to/python $0" >&2
exit 2
