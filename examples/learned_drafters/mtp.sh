#!/usr/bin/env bash
# A layer for multi-token prediction on a model that was trained without: the target stays as it is, and is written, with the
# layer in it, in MiMo's layout, which vLLM loads. No 'model' is named then: the layer is the target's own.
#
#     bash examples/learned_drafters/mtp.sh           (options: see common.sh)
#
# COST_MTP
source "$(dirname "$0")/common.sh"
vllm-specplugin train mtp --target "$TARGET" --data "$ANSWERS" --out "$WORK/mtp" --max-length 512 \
  --minutes "$MINUTES" --depth 3 --loss-vocab-size 8192
serve "$WORK/mtp" '{"proposer": "mtp", "num_speculative_tokens": 2}'
