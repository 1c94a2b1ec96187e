#!/bin/sh
# All prepared kernels on one GPU: equality first, then times. --dry: on a CPU, tiny, interpreted.
cd "$(dirname "$0")/.." || exit 1
for each in "$@"; do [ "$each" = --dry ] && export TRITON_INTERPRET=1; done
PYTHONPATH=. timeout 240 "${PYTHON:-python}" -W "ignore:Conversion of an array" prepared/go.py "$@"
