"""Raw text as GPT-2's tokens, a document a line: `python recipes/decay_finetune/bpe.py VOCABULARY_FOLDER TEXT OUT`.

The folder holds vocab.json and merges.txt, as Hugging Face names them, or encoder.json and vocab.bpe, as OpenAI and
fairseq do; fairseq's own code splits the text. A line <|endoftext|> stands between two documents; everything else is
text, line ends included. fairseq-preprocess ends each line of the result with </s>, which is that mark.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fairseq.data.encoders.gpt2_bpe_utils import Encoder, get_encoder

NAMES = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")]
MARK = "<|endoftext|>"


def find_vocabulary(folder: Path) -> tuple[Path, Path]:
    """The two files of a vocabulary. Raises ValueError where there are none."""
    for pair in NAMES:
        first, second = (folder / name for name in pair)
        if first.is_file() and second.is_file():
            return first, second
    raise ValueError(f"{folder} has neither {' with '.join(NAMES[0])} nor {' with '.join(NAMES[1])}: put them there")


def read_encoder(folder: Path) -> Encoder:
    """fairseq's encoder of a folder. Raises ValueError unless the tokens are those of the model beside them, if any."""
    vocabulary, merges = find_vocabulary(folder)
    try:
        encoder = get_encoder(str(vocabulary), str(merges))
        last = max(encoder.encoder.values())
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{vocabulary} or {merges.name} is no vocabulary of GPT-2: {error}") from error
    config = folder / "config.json"
    words = json.loads(config.read_text(encoding="utf-8"))["vocab_size"] if config.is_file() else last + 1
    if last >= words:
        raise ValueError(f"{vocabulary} has tokens up to number {last}, and the model of {config} {words} words")
    return encoder


def documents(text: Path) -> Iterator[str]:
    """The documents of a text, without the line end before a mark."""
    lines: list[str] = []
    with text.open(encoding="utf-8", newline="") as file:
        for line in file:
            if line.rstrip("\r\n") == MARK:
                yield "".join(lines).removesuffix("\n")
                lines = []
            else:
                lines.append(line)
    if lines:
        yield "".join(lines).removesuffix("\n")


def encode(folder: Path, text: Path, out: Path) -> int:
    """Writes the numbers of the tokens; how many there are. Raises ValueError for a text that holds none."""
    encoder = read_encoder(folder)
    unfinished, count = out.with_name(f"{out.name}.unfinished"), 0
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for document in documents(text):
                tokens = encoder.encode(document)
                count += len(tokens)
                file.write(" ".join(map(str, tokens)) + "\n")
        if not count:
            raise ValueError(f"{text} holds no text")
        os.replace(unfinished, out)
    except KeyError as error:
        raise ValueError(
            f"the merges in {folder} make {error}, which its vocabulary lacks: take both of one model"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return count


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python recipes/decay_finetune/bpe.py VOCABULARY_FOLDER TEXT OUT")
    try:
        print(f"{sys.argv[2]}: {encode(*map(Path, sys.argv[1:])):,} tokens")
    except (OSError, ValueError) as error:
        sys.exit(f"bpe.py: {error}")
