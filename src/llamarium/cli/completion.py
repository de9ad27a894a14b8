"""Print a script that completes llamarium's commands and options in a shell.

bash    eval "$(llamarium completion bash)"        in ~/.bashrc
zsh     eval "$(llamarium completion zsh)"         in ~/.zshrc, after compinit
fish    llamarium completion fish | source         in config.fish
"""

import argparse
from collections.abc import Iterator
from shlex import quote

from llamarium.cli.main import COMMANDS, SUBCOMMANDS, command_parser

_BASH = """\
_llamarium() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} options= values=
    if ((COMP_CWORD == 1)); then
        values={commands}
    else
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}} " in
{cases}
        esac
    fi
    [[ $word == -* ]] && values=$options
    COMPREPLY=($(compgen -W "$values" -- "$word"))
}}
complete -o default -F _llamarium llamarium
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="for which the script is")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    actions = {name: command_parser(name)._actions for name in (*sorted(SUBCOMMANDS), *COMMANDS)}  # pyright: ignore[reportPrivateUsage]
    if args.shell == "fish":
        print("\n".join(_fish(actions)))
    else:
        cases = "\n".join(line for name, listed in actions.items() for line in _bash_case(name, listed))
        script = _BASH.format(commands=quote(" ".join(COMMANDS)), cases=cases)
        print("autoload -U +X bashcompinit && bashcompinit\n" * (args.shell == "zsh") + script, end="")
    return 0


def _bash_case(name: str, actions: list[argparse.Action]) -> Iterator[str]:
    """Yield what sets `options` and `values` within a command: after an option, what it takes."""
    options = [option for action in actions for option in action.option_strings]
    values = [value for action in actions if not action.option_strings for value in _choices(action)]
    yield f'            "{name} "*) options={quote(" ".join(options))} values={quote(" ".join(values))}'
    yield "                case $before in"
    for action in actions:
        if action.option_strings and action.nargs != 0:
            taken = quote(" ".join(_choices(action)))
            yield f"                    {'|'.join(action.option_strings)}) options= values={taken} ;;"
    yield "                esac ;;"


def _fish(actions: dict[str, list[argparse.Action]]) -> Iterator[str]:
    for name, summary in COMMANDS.items():
        yield f"complete -c llamarium -n __fish_use_subcommand -f -a {name} -d {quote(summary)}"
        for action in actions[name]:
            line = f"complete -c llamarium -n '__fish_seen_subcommand_from {name}'"
            for option in action.option_strings:
                line += f" -l {option[2:]}" if option.startswith("--") else f" -s {option[1:]}"
            taken = " ".join(_choices(action))
            if action.option_strings or taken:
                line += f" -x -a {quote(taken)}" if taken else " -r" if action.nargs != 0 else " -f"
                yield line


def _choices(action: argparse.Action) -> list[str]:
    return list(map(str, action.choices or ()))
