"""Prints the README's table of options: `python -m snapcap.service.config.table`."""

from snapcap.service.config.settings import GROUPS
from snapcap.warmup.option import options_of


def markdown() -> str:
    """One row an option, in the order of the help."""
    lines = ["| option | variable | default | |", "|---|---|---|---|"]
    for group in GROUPS.values():
        for option in options_of(group).values():
            flag = option.flag if option.is_switch else f"{option.flag} {option.metavar}".replace("|", "\\|")
            lines.append(f"| `{flag}` | `{option.variable}` | {option.default_text} | {option.help} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
