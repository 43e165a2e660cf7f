# What the examples of this folder share: the target, the data, and how to serve. Sourced by medusa.sh, eagle.sh, eagle3.sh, mtp.sh.
#
#     TARGET   the model to draft for (default: SmolLM2-135M-Instruct, made by `vllm-specplugin demo-model`)
#     WORK     where everything is written (default: ./learned-drafters)
#     PROMPTS  how many prompts the target answers (default: 768; about 90,000 tokens of answers)
#     MINUTES  of training for each drafter (default: 20)
#     SERVE    1: start `vllm serve` with the drafter at the end
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export WORK=${WORK:-learned-drafters}
mkdir -p "$WORK"
TARGET=${TARGET:-$(vllm-specplugin demo-model)}
PROMPTS=${PROMPTS:-768}
MINUTES=${MINUTES:-20}
ANSWERS=$WORK/answers-$PROMPTS.jsonl

# Each step is skipped where it has been done: `distill` goes on with its file, `train` with its folder, and hidden states are cached.
[ -f "$WORK/prompts-$PROMPTS.jsonl" ] || python "$here/prompts.py" --count "$PROMPTS" --out "$WORK/prompts-$PROMPTS.jsonl"
vllm-specplugin distill --target "$TARGET" --data "$WORK/prompts-$PROMPTS.jsonl" --out "$ANSWERS" --max-tokens 192

serve() { # serve MODEL SPECULATIVE_CONFIG
  echo "Serve it:  vllm serve $1 --speculative-config '$2'"
  if [ "${SERVE:-0}" = 1 ]; then exec vllm serve "$1" --speculative-config "$2"; fi
}
