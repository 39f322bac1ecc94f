#!/usr/bin/env bash
# The whole pipeline on a small real model, on a plain CPU: no GPU, no account, no model hub.
#
#   bash scripts/quickstart.sh                    a stopped run goes on with the same command
#   bash scripts/quickstart.sh work_dir=/data/q   arguments go to both stages, as Hydra overrides
#
# FORETOKEN_PYTHON and FORETOKEN_TORCH are described in scripts/setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
keep_buffers
trap 'printf "\nStopped. The same command goes on from here.\n" >&2; exit 130' INT

run=(+model=smollm2 work_dir=outputs/quickstart)
bench=(data=instructions "data.languages=[en]" "tasks=[maths]" "splits=[fresh,test]" prompts_per_task=6 short_tokens=0 long_tokens=128
    rounds=2 prompt_lookup_tokens=0 "num_draft_tokens=[3,5]")

require_free_gb 2 "the pipeline (model, hidden states, checkpoint)"
step "1/3 environment" setup_env ""
step "2/3 the target answers prompts, and heads are trained on its hidden states" \
    "$PYTHON" -m train.mtp "${run[@]}" experiment=quickstart "$@"
step "3/3 held-out prompts are decoded and timed" "$PYTHON" -m eval.bench "${run[@]}" drafter=heads "${bench[@]}" "$@"

cat <<END

All of it took $SECONDS s. Next:
  source .venv/bin/activate
  python -m scripts.generate outputs/quickstart/mtp --prompt "Tom has 4 boxes of 6 pens. How many pens is that?"
  python -m train.mtp +model=llama                  # the same for another target: also qwen, gemma, any hub name or folder
  python -m train.mtp --help                        # every option
END
