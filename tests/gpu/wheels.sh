#!/usr/bin/env bash
# Fetches into tests/gpu/wheels what a machine without a network may lack; more names may follow.
#   tests/gpu/wheels.sh                                                2.9 MiB
#   tests/gpu/wheels.sh scipy ruptures pandas python-dateutil tzdata   52 MiB
# Only figures need these:
#   tests/gpu/wheels.sh matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing \
#     python-dateutil tzdata                                  27 MiB
set -eu
PYTHON=$(realpath --no-symlinks "$(command -v "${PYTHON:-python3}")")
cd "$(dirname "$0")"
# README.md says what else must be there
"$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "${FOR:-3.12}" \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 \
  --constraint ../../constraints.txt --dest wheels \
  msgspec click rich markdown-it-py mdurl pygments jinja2 markupsafe psutil nvidia-ml-py \
  pytest pluggy iniconfig packaging pytest-rerunfailures "$@"
du -sh wheels
