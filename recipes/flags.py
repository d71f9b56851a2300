"""Turn a flat YAML into command-line flags, one argument per line: `python recipes/flags.py conf/delta.yaml`.

    arch: delta_lm_wt103          ->  --arch delta_lm_wt103
    dropout: 0.1                  ->  --dropout 0.1
    share-decoder-input-output-embed: true  ->  --share-decoder-input-output-embed
    include: common.yaml          ->  the flags of that file first (its path is relative to this one)

Values are passed on exactly as written, so 1e-3 stays 1e-3. In a shell, with `set -e` in force:

    flags=$(python recipes/flags.py conf/delta.yaml)
    mapfile -t flags <<<"$flags"
    fairseq-train DATA "${flags[@]}"
"""

import sys
from pathlib import Path

import yaml


def read_flags(path: Path) -> list[str]:
    """The flags of one YAML file, in the order written; ValueError says what is wrong with it."""
    try:
        # BaseLoader leaves every value the string it is in the file.
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must be a flat list of `flag: value` lines.")
    flags = []
    for name, value in settings.items():
        # The shell reads one argument a line.
        if not isinstance(value, str) or value in ("", "false") or len(f"{name}{value}".splitlines()) > 1:
            raise ValueError(f"{path}: {name} needs one plain value (`true` for a switch; leave out what is off).")
        if name == "include":
            flags += read_flags(path.parent / value)
        else:
            flags += [f"--{name}"] if value == "true" else [f"--{name}", value]
    return flags


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python recipes/flags.py conf/NAME.yaml")
    try:
        print("\n".join(read_flags(Path(sys.argv[1]))))
    except ValueError as error:
        sys.exit(f"flags.py: {error}")
