#!/usr/bin/env bash
# An EAGLE-3 head: three of the target's layers fused, trained on several drafts at once, with a small vocabulary to draft from.
#
#     bash examples/learned_drafters/eagle3.sh                             (what can be set: common.sh)
#     MINUTES=38 PROMPTS=2400 bash examples/learned_drafters/eagle3.sh     (as it was run for what follows)
#
# Cost, on two shared cores of an AMD EPYC without AMX: 20 minutes for the answers, 10 for hidden states, 38 of
# training on one core.
# Result: acceptance length 1.8 on code, 2.1 on JSON, 1.3 and 1.4 on documents and chat (docs/benchmarks/learned-drafters.md).
source "$(dirname "$0")/common.sh"
train eagle3 --ttt-steps 4 --draft-vocab-size 8192 --freeze-output
serve "$TARGET" "{\"proposer\": \"eagle3\", \"model\": \"$HEADS\"}"
