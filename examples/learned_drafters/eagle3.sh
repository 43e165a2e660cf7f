#!/usr/bin/env bash
# An EAGLE-3 head: three of the target's layers fused, trained on several steps at once, with a small vocabulary to draft from.
#
#     bash examples/learned_drafters/eagle3.sh        (options: see common.sh)
#
# COST_EAGLE3
source "$(dirname "$0")/common.sh"
vllm-specplugin train eagle3 --target "$TARGET" --data "$ANSWERS" --out "$WORK/eagle3" --max-length 512 \
  --minutes "$MINUTES" --ttt-steps 4 --draft-vocab-size 8192
serve "$TARGET" "{\"proposer\": \"eagle3\", \"model\": \"$WORK/eagle3\"}"
