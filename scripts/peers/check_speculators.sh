#!/usr/bin/env bash
# The speculators package, whose format vLLM reads, on an exported EAGLE-3 head: it must load the folder as it is, and
# compute the logits that this project's head computes.
#
#   bash scripts/peers/check_speculators.sh            train a small head first, if there is none
#   bash scripts/peers/check_speculators.sh CHECKPOINT  one of `python -m train.mtp +model=smollm2 heads=eagle3`
#
# Not part of the tests: the package goes into an environment of its own (FORETOKEN_SPECULATORS_ENV, .venv-speculators by
# default), which sees torch and transformers of this project's. Some 100 MB; both sides run in float32.
#
# FORETOKEN_PYTHON and FORETOKEN_TORCH are described in scripts/setup_env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
keep_buffers

SPECULATORS=speculators==0.9.0
work=outputs/check_speculators
package_env=${FORETOKEN_SPECULATORS_ENV:-$PWD/.venv-speculators}
checkpoint=${1:-$work/eagle3}

# The package asks for older transformers and datasets than this project has, for torchaudio and for torchvision; loading
# a head needs none of them.
install_speculators() {
    local python=$package_env/bin/python
    if [ -f "$package_env/complete" ] && [ "$(cat "$package_env/complete")" = "$SPECULATORS" ]; then
        printf 'Using %s\n' "$package_env"
        return
    fi
    "$PYTHON" -m venv --clear "$package_env"
    "$PYTHON" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
        >"$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/foretoken.pth"
    "$python" -m pip install --quiet --no-deps "$SPECULATORS" hs-connectors==0.9.0
    "$python" -m pip install --quiet openai 'loguru>=0.7.2,<=0.7.3' pydantic-settings typer
    printf '%s' "$SPECULATORS" >"$package_env/complete"
}

train_head() {
    if [ -f "$checkpoint/model.safetensors" ]; then
        printf 'Using the head in %s\n' "$checkpoint"
        return
    fi
    [ "$checkpoint" = "$work/eagle3" ] || fail "$checkpoint holds no heads: give the folder that train.mtp wrote"
    "$PYTHON" -m train.mtp +model=smollm2 model.dtype=float32 heads=eagle3 experiment=quickstart "work_dir=$work" \
        data.max_prompts=120 answers.max_new_tokens=64 answers.batch_size=120 trainer.num_train_epochs=6
}

step "1/4 environment" setup_env ""
step "1/4 speculators" install_speculators
step "2/4 head" train_head
step "3/4 this project's logits" "$PYTHON" -m scripts.peers.check_speculators ours "$work" --checkpoint "$checkpoint"
step "4/4 the package's" env HF_HUB_OFFLINE=1 "$package_env/bin/python" scripts/peers/check_speculators.py theirs "$work"
"$PYTHON" -m scripts.peers.check_speculators compare "$work"
