# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh, from the root of the project. Owns the virtual environment: finds a Python, makes
# .venv (or takes the active one), and installs under constraints.txt. Nothing is done twice: a stamp file in the
# environment holds a hash of all that decides what is installed.
#
#   setup_env ""      what training and decoding from this checkout need
#   setup_env dev     that, and what the checks need
#
# Afterwards $PYTHON is the environment's interpreter and its bin/ folder leads PATH.
#
#   FORETOKEN_PYTHON  the interpreter that makes .venv (otherwise the first of python3, python3.13, ... new enough)
#   FORETOKEN_TORCH   what to install as torch, e.g. a build for a certain accelerator: 'torch==2.13.0 --index-url URL'

MIN_PYTHON=3.11

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# glibc gives large buffers, such as a batch's logits, back to the system after each use, and every page of the next one
# then costs a fault: a third more time for a training step on a CPU. After this it keeps them.
keep_buffers() {
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-4294967296}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-17179869184}
}

# step NAME COMMAND...: runs the command under a header and tells how long it took. A failure ends the script (set -e).
step() {
    STEP=$1
    STEP_STARTED=$SECONDS
    shift
    printf '\n== %s\n' "$STEP"
    "$@"
    printf '== %s: done in %d s\n' "$STEP" $((SECONDS - STEP_STARTED))
    STEP=
}

report_failed_step() {
    local status=$?
    # 130: stopped by Ctrl-C, which is no failure.
    if [ "$status" -ne 0 ] && [ "$status" -ne 130 ] && [ -n "${STEP:-}" ]; then
        printf '\n== %s: FAILED after %d s (exit status %d)\n' "$STEP" $((SECONDS - STEP_STARTED)) "$status" >&2
    fi
}
trap report_failed_step EXIT

is_new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info < tuple(map(int, '$MIN_PYTHON'.split('.'))))" >/dev/null 2>&1
}

find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11 python)
    if [ -n "${FORETOKEN_PYTHON:-}" ]; then
        candidates=("$FORETOKEN_PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        if is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python >= $MIN_PYTHON found (tried: ${candidates[*]}). Install one, or name it:" \
        "FORETOKEN_PYTHON=/path/to/python$MIN_PYTHON"
}

# require_free_gb GB WHY: stops early instead of at 99% of a download.
require_free_gb() {
    local free
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    if [ "$free" -lt "$1" ]; then
        fail "$PWD has $free GB free, and $2 takes up to $1 GB. Free some space, or work from a folder on another disk."
    fi
}

make_environment() {
    local base
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        ENVIRONMENT=$VIRTUAL_ENV
        is_new_enough "$ENVIRONMENT/bin/python" ||
            fail "the active environment $ENVIRONMENT has no Python >= $MIN_PYTHON: deactivate it, and .venv is used"
    else
        ENVIRONMENT=$PWD/.venv
        if ! "$ENVIRONMENT/bin/python" -m pip --version >/dev/null 2>&1; then
            base=$(find_python)
            printf 'Making %s with %s\n' "$ENVIRONMENT" "$base"
            "$base" -m venv --clear "$ENVIRONMENT" ||
                fail "could not make $ENVIRONMENT. On Debian and Ubuntu the package python3-venv is needed."
        fi
    fi
    PYTHON=$ENVIRONMENT/bin/python
    export PATH="$ENVIRONMENT/bin:$PATH"
}

# torch comes first and alone, so that nothing else chooses its build; the rest then holds to the version that is there.
install() {
    local extra=$1 installed_torch quiet=--quiet constraints=$ENVIRONMENT/foretoken-constraints.txt
    if [ -t 1 ]; then
        quiet= # a terminal gets pip's progress bars
    fi
    grep -v '^torch==' constraints.txt >"$constraints"
    # Split on purpose: FORETOKEN_TORCH may carry options for pip.
    # shellcheck disable=SC2046,SC2086
    "$PYTHON" -m pip install $quiet -c "$constraints" ${FORETOKEN_TORCH:-$(grep '^torch==' constraints.txt)}
    installed_torch=$("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))')
    printf 'torch %s is there; installing the rest\n' "$installed_torch"
    printf 'torch==%s\n' "$installed_torch" >>"$constraints"
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install $quiet -c "$constraints" -e ".[train${extra:+,$extra}]"
}

setup_env() {
    local extra=$1 fingerprint stamp
    make_environment
    stamp=$ENVIRONMENT/foretoken-installed
    fingerprint=$({ cat pyproject.toml constraints.txt; printf '%s %s' "$PWD" "${FORETOKEN_TORCH:-}"; } | cksum)
    # What dev installs holds all that running needs.
    if grep -qsxF "$fingerprint" "$stamp-${extra:-base}" "$stamp-dev"; then
        printf 'Using %s: up to date\n' "$ENVIRONMENT"
        return
    fi
    require_free_gb 8 "the installation"
    printf 'Installing into %s: a few minutes the first time\n' "$ENVIRONMENT"
    install "$extra"
    printf '%s\n' "$fingerprint" >"$stamp-${extra:-base}"
}
