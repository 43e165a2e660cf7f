# What the examples of this folder share: the target, the data, training once, and serving. Sourced by medusa.sh, eagle.sh,
# eagle3.sh and mtp.sh.
#
#     TARGET   the model to draft for (default: SmolLM2-135M-Instruct, made by `vllm-specplugin demo-model`)
#     WORK     where everything is written (default: ./learned-drafters)
#     PROMPTS  how many prompts the target answers (default: 768, about 90,000 tokens of answers)
#     MINUTES  of training for each drafter (default: 20)
#     SERVE    1: start `vllm serve` with the drafter at the end
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-learned-drafters}
mkdir -p "$WORK"
TARGET=${TARGET:-$(vllm-specplugin demo-model)}
PROMPTS=${PROMPTS:-768}
MINUTES=${MINUTES:-20}
QUESTIONS=$WORK/prompts-$PROMPTS.jsonl
ANSWERS=$WORK/answers-$PROMPTS.jsonl

# What is there already is not made again: `distill` goes on with its file, and hidden states are cached.
if [ ! -f "$QUESTIONS" ]; then
  python "$here/prompts.py" --count "$PROMPTS" --out "$QUESTIONS.partial"
  mv "$QUESTIONS.partial" "$QUESTIONS" # only now is it whole
fi
vllm-specplugin distill --target "$TARGET" --data "$QUESTIONS" --out "$ANSWERS" --max-tokens 192

train() { # train FAMILY OPTIONS...: into $HEADS, a folder for each size of a run, or on from where it was interrupted
  family=$1
  shift
  HEADS=$WORK/$family-$PROMPTS-$MINUTES
  [ -f "$HEADS/model.safetensors" ] ||
    vllm-specplugin train "$family" --target "$TARGET" --data "$ANSWERS" --out "$HEADS" --max-length 512 \
      --minutes "$MINUTES" --evaluations 4 "$@"
}

serve() { # serve MODEL SPECULATIVE_CONFIG
  echo "Serve it:  vllm serve $1 --speculative-config '$2'"
  if [ "${SERVE:-0}" = 1 ]; then exec vllm serve "$1" --speculative-config "$2"; fi
}
