"""Count what fairseq-preprocess wrote: `python recipes/lm_counts.py BIN [NAME=COUNT...]` fails where a count differs.

    python recipes/lm_counts.py data/bin train=103227021 valid=217646 test=245569 vocabulary=267735

Tokens include the end of each line; so does the vocabulary, which has the other special symbols only as far as they
are words of the training text (<unk> in WikiText).
"""

import sys
from pathlib import Path

from fairseq.data import Dictionary, data_utils


def counts(folder: Path) -> dict[str, int]:
    """The tokens of each split and the size of the vocabulary."""
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    found, specials = {}, {dictionary.eos()}
    for split in ("train", "valid", "test"):
        text = folder / f"{split}.bin"
        if text.exists() and not text.stat().st_size:
            raise ValueError(f"{split}.txt holds no text: give it at least one line")
        lines = data_utils.load_indexed_dataset(str(folder / split), dictionary)
        if lines is None:
            raise ValueError(f"{folder / split}.bin is missing: prepare the data again.")
        found[split] = int(lines.sizes.sum())
        if split == "train" and any((lines[i] == dictionary.unk()).any() for i in range(len(lines))):
            specials.add(dictionary.unk())
    words = [word for word in dictionary.symbols[dictionary.nspecial :] if not word.startswith("madeupword")]
    return found | {"vocabulary": len(words) + len(specials)}


def check(folder: Path, expected: dict[str, int]) -> dict[str, int]:
    """The counts; ValueError unless they are those expected."""
    found = counts(folder)
    wrong = [
        f"{name} {found[name]:,} in place of {count:,}" for name, count in expected.items() if found[name] != count
    ]
    if wrong:
        raise ValueError(f"this is another text than the recipe's: {', '.join(wrong)}. If it is meant, add --any-text.")
    return found


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python recipes/lm_counts.py BIN [NAME=COUNT...]")
    try:
        expected = {name: int(count) for name, count in (word.split("=") for word in sys.argv[2:])}
        for name, count in check(Path(sys.argv[1]), expected).items():
            print(f"{name}: {count:,}")
    except ValueError as error:
        sys.exit(f"lm_counts.py: {error}")
