#!/usr/bin/env bash
# DIVERSED on a small real model, on a plain CPU: no GPU, no account, no model hub. SmolLM2 135M is first tuned to tell
# stories that add two numbers, in free wording; then draft heads, then ensemble heads over a grid of lambda and one under
# a reward floor, then the frontier of all rules on prompts that none of them has seen.
#
#   bash scripts/diversed.sh               a stopped run goes on with the same command
#   bash scripts/diversed.sh /data/stories another folder than outputs/stories
#
# FORETOKEN_PYTHON and FORETOKEN_TORCH are described in scripts/setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
keep_buffers
trap 'printf "\nStopped. The same command goes on from here.\n" >&2; exit 130' INT

folder=${1:-outputs/stories}
tuned=(+model=tuned "work_dir=$folder")
checkpoints=

verifier() { # NAME OVERRIDES...
    local name=$1
    shift
    checkpoints+="${checkpoints:+,}\"$name=$folder/diversed/$name\""
    step "4/5 the verifier $name is trained" "$PYTHON" -m rl.diversed "${tuned[@]}" experiment=stories_diversed \
        "output_dir=$folder/diversed/$name" "$@"
}

require_free_gb 6 "the pipeline (model, checkpoints of its tuning, hidden states)"
step "1/5 environment" setup_env eval,rl
step "2/5 SmolLM2 learns to tell stories" "$PYTHON" -m train.sft +model=smollm2 "work_dir=$folder" data=stories
step "3/5 draft heads are trained on it" "$PYTHON" -m train.mtp "${tuned[@]}" experiment=stories
verifier lam-0.3 lam=0.3
verifier lam-1 lam=1
verifier floor lam=3 floor.max_drop=0.025
step "5/5 all rules on test prompts" "$PYTHON" -m eval.pareto "${tuned[@]}" data=stories drafter=heads reward=stories \
    max_new_tokens=72 batch_size=32 prompts_per_turn=8 "rules.static.target_weight=[0.8,0.5,0.2,0.0]" \
    "rules.lenience.lenience=[0.3]" "rules.typical.delta=[0.3]" "rules.cascade.alpha=[0.2]" \
    "rules.budget.distance_budget=[3.0]" "checkpoints=[$checkpoints]"

cat <<END

All of it took $SECONDS s. The table, the plot and the page of tokens are in $folder/pareto.
END
