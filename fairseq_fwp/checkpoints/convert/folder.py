"""Write folders with config.json and weights as safetensors; the words of those of Hugging Face's transformers.

There words of our dictionary are the tokens' names in vocab.txt, or else their numbers, as fairseq's `--bpe gpt2`
writes them, and `</s>` is the end of a text. In folders of this package config.json has the flags of training, and
dict.txt the words.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq.data import Dictionary
from safetensors.torch import save_file
from torch import Tensor

from fairseq_fwp.checkpoints.convert.checkpoint import build_converted, dictionaries, make_task, new_folder
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Option, Options
from fairseq_fwp.checkpoints.convert.vocabulary import given_words
from fairseq_fwp.checkpoints.pretrained import folder as pretrained
from fairseq_fwp.checkpoints.pretrained.dictionary import DICTIONARY
from fairseq_fwp.checkpoints.pretrained.folder import CONFIG, WEIGHTS, read_config
from fairseq_fwp.modules.decoding import STARTS
from fairseq_fwp.patches.hooks import KEY, fingerprints
from fairseq_fwp.patches.options import Settings
from fairseq_fwp.tasks.lines import line_start

VOCABULARY = "vocab.txt"
# What a folder of transformers does not say of its texts.
OPTIONS = {
    "end": Option(
        str, f"token that ends a text, by its name in {VOCABULARY} or its number; default: eos_token_id", "T"
    ),
    "line-start": Option(
        line_start,
        "each line of the text is a sample by itself, and the model reads first: end: </s>, word: the line's own first "
        "word; default: the text is one stream",
        "|".join(STARTS),
    ),
}


def read(path: Path, name: str, sizes: Sequence[str]) -> tuple[dict[str, Tensor], Settings]:
    """Return weights and config.json as `pretrained.folder.read` does, but nothing that only `OPTIONS` can say."""
    tensors, config = pretrained.read(path, name, sizes)
    options = {option.replace("-", "_") for option in OPTIONS}
    return tensors, {setting: value for setting, value in config.items() if setting not in options}


def words_of_tokens(name: str, sizes: Sequence[str], path: Path, vocabulary: Path | None) -> list[str]:
    """Return the words of the dictionary, in the order of the tokens: their names, or else their numbers.

    name, sizes: as for `read_config`; vocabulary: the file of the names; None: vocab.txt in the folder, if it is there.
    """
    count, file = read_config(path, name, sizes)["vocab_size"], vocabulary or path / VOCABULARY
    if vocabulary is None and not file.exists():
        return [str(number) for number in range(count)]
    words = given_words(path, file)
    if len(words) > count:
        raise ValueError(f"{file} must have at most {count} words, vocab_size in {path / CONFIG}, got {len(words)}")
    known = {*words}
    return words + [_filler(number, known) for number in range(len(words), count)]


def _filler(number: int, words: set[str]) -> str:
    """Return the name of a row that only fills the table: its number, or as fairseq names such words if this is one."""
    name = str(number)
    while name in words:
        name = f"madeupword{name}"
    return name


def with_end(words: Sequence[str], options: Options) -> list[str]:
    """Return the words with </s> in place of the token that ends a text: --end, or else eos_token_id of config.json.

    Raises ValueError for a token that is not among the words.
    """
    end, eos, renamed = options.get("end"), options.get("eos_token_id"), list(words)
    if end is not None:
        numbers = {word: number for number, word in enumerate(words)}
        number = int(end) if str(end).isdecimal() and int(end) < len(words) else numbers.get(end)
        if number is None:
            got = f"got {end!r}; words are in {VOCABULARY} or --vocabulary"
            raise ValueError(f"--end must be a token: a word of the vocabulary, or its number, {got}")
        if not isinstance(end, int) and numbers.get(end, number) != number:
            both = f"the number of {words[number]!r} and the name of token {numbers[end]}"
            raise ValueError(f"--end must name one token, got {end!r}, {both}: give the other name of the one you mean")
        eos = number
    if eos is None:
        return renamed
    if not (type(eos) is int and 0 <= eos < len(words)):
        got = f"{eos!r}: give the token that ends a text as --end"
        raise ValueError(f"eos_token_id in {CONFIG} must be one number in [0, {len(words)}), the vocabulary, got {got}")
    renamed[eos] = "</s>"
    return renamed


def write_model(conversion: Conversion, out: Path) -> None:
    """Write a language model of this package, for `fairseq_fwp.load` and --source fwp-lm, or nothing.

    Raises ValueError if the folder exists and is not empty, and if the weights do not fit the model of the flags.
    """
    if isinstance(conversion.words, dict):
        raise ValueError(f"the model must be a language model to be written as safetensors, got {conversion.arch}")
    model, (dictionary,) = build_converted(conversion), dictionaries(conversion).values()
    # Each parameter once, although the input and the output may share it.
    names = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    flags = {name: value for name, value in conversion.flags.items() if value is not None}
    of_words = {"vocab_size": len(dictionary), KEY: fingerprints(make_task(conversion))}
    if conversion.line_start is not None:
        flags["line_start"] = conversion.line_start
    write(out, {"model_type": conversion.arch, **of_words, **flags}, tensors, dictionary)


def write(out: Path, config: Settings, tensors: Mapping[str, Tensor], dictionary: Dictionary | None = None) -> None:
    """Write config.json, model.safetensors and dict.txt, if there is a dictionary, into a new folder, or nothing."""
    with new_folder(out) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
        # safetensors 0.8 writes files that only their owner can read.
        (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)
        if dictionary is not None:
            dictionary.save(str(folder / DICTIONARY))
