#!/usr/bin/env bash
# Medusa heads for a model that has none: distil its answers, train, serve.
#
#     bash examples/learned_drafters/medusa.sh        (options: see common.sh)
#
# COST_MEDUSA
source "$(dirname "$0")/common.sh"
vllm-specplugin train medusa --target "$TARGET" --data "$ANSWERS" --out "$WORK/medusa" --max-length 512 \
  --minutes "$MINUTES" --draft-vocab-size 8192
serve "$TARGET" "{\"proposer\": \"medusa\", \"model\": \"$WORK/medusa\"}"
