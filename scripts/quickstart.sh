#!/usr/bin/env bash
# The whole pipeline on a small real model, on a plain CPU: no GPU, no account, no model hub.
#
#   bash scripts/quickstart.sh                    a stopped run goes on with the same command
#   bash scripts/quickstart.sh seed=1             arguments go to every stage, as Hydra overrides
#
# FORETOKEN_PYTHON and FORETOKEN_TORCH are described in scripts/setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
trap 'printf "\nStopped. The same command goes on from here.\n" >&2; exit 130' INT

run=(+model=smollm2 experiment=quickstart)

require_free_gb 2 "the pipeline (model, hidden states, checkpoint)"
step "1/4 environment" setup_env ""
step "2/4 the target answers prompts" "$PYTHON" -m train.regenerate "${run[@]}" "$@"
step "3/4 heads are trained on its hidden states" "$PYTHON" -m train.mtp "${run[@]}" "$@"
step "4/4 held-out prompts are decoded and timed" "$PYTHON" -m eval.bench "${run[@]}" drafter=heads "$@"

cat <<END

All of it took $SECONDS s. Next:
  source .venv/bin/activate
  python -m scripts.generate --help                 # decode a prompt of your own with the heads just trained
  python -m train.mtp +model=llama                  # the same for another target: also qwen, gemma, any hub name or folder
  python -m train.mtp --help                        # every option
END
