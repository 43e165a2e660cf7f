#!/usr/bin/env bash
# An EAGLE head: one decoder layer that extrapolates the target's last hidden state, drafting with the target's own output layer.
#
#     bash examples/learned_drafters/eagle.sh         (options: see common.sh)
#
# COST_EAGLE
source "$(dirname "$0")/common.sh"
vllm-specplugin train eagle --target "$TARGET" --data "$ANSWERS" --out "$WORK/eagle" --max-length 512 \
  --minutes "$MINUTES" --ttt-steps 3 --loss-vocab-size 8192
serve "$TARGET" "{\"proposer\": \"eagle\", \"model\": \"$WORK/eagle\"}"
