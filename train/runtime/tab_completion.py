"""Tab completion of options in bash: `eval "$(python -m train.mtp -sc install=bash)"`, once for all commands.

Hydra's own script completes `python file.py` and installed programs. A command here is a module, `python -m train.mtp`,
which it passes over: this one hands such lines to the command's own `-sc query=bash`, which Hydra answers.
"""

from __future__ import annotations

from collections.abc import Sequence

FLAGS = ("-sc", "--shell_completion", "--shell-completion")
# Hydra reads the words behind the first two of COMP_LINE; `=` must not break a word, as in Hydra's script.
INSTALL = r"""
_foretoken_complete() {
    local line=${COMP_LINE:0:COMP_POINT} words choices
    COMPREPLY=()
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    ((${#words[@]} > 3)) && [[ ${words[1]} == -m && ${words[2]} =~ ^(train|rl|eval)\.[a-z_]+$ ]] || return 0
    choices=$(COMP_LINE="python ${words[2]} ${words[*]:3}" "${words[0]}" -m "${words[2]}" -sc query=bash 2>/dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "${words[-1]}"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -o bashdefault -F _foretoken_complete python python3
"""
UNINSTALL = "complete -r python python3; unset -f _foretoken_complete"


def script_for(words: Sequence[str]) -> str | None:
    """What these words of a command line print for bash; None where they ask for something else."""
    if not any(flag in words for flag in FLAGS):
        return None
    return {"install=bash": INSTALL, "uninstall=bash": UNINSTALL}.get(next((w for w in words if w not in FLAGS), ""))
