#!/usr/bin/env bash
# Builds what is missing in build/ (a volume) for the GPU that is here, then serves it with the
# container's own tritonserver, which gets the arguments of this script. NAME, MODEL, DRAFTER and
# DTYPE are the Makefile's variables; DSPARK_CONFIG names a JSON file of decoder options.
set -euo pipefail
cd "$(dirname "$0")/.."

export NAME=${NAME:-smollm2} DTYPE=${DTYPE:-fp16} TARGET=tensorrt SERVING=${DSPARK_CONFIG:-}
make engines
exec tritonserver --model-repository "build/$NAME/repository" "$@"
