#!/usr/bin/env bash
# An EAGLE head: one decoder layer that extrapolates the target's last hidden state, drafting with the target's own output layer.
#
#     bash examples/learned_drafters/eagle.sh                              (what can be set: common.sh)
#     MINUTES=36 PROMPTS=2400 bash examples/learned_drafters/eagle.sh      (as it was run for what follows)
#
# Cost, on two shared cores of an AMD EPYC without AMX: 20 minutes for the answers, 10 for hidden states, 36 of
# training on one core.
# Result: acceptance length 1.8 on code, 1.8 on JSON, 1.3 and 1.3 on documents and chat (docs/benchmarks/learned-drafters.md).
source "$(dirname "$0")/common.sh"
train eagle --ttt-steps 3 --loss-vocab-size 8192
serve "$TARGET" "{\"proposer\": \"eagle\", \"model\": \"$HEADS\", \"num_speculative_tokens\": 2, \"control\": \"adaptive\"}"
