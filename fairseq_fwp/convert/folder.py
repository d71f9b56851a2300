"""Write folders with config.json and weights as safetensors; the words of those of Hugging Face's transformers.

There words of our dictionary are the numbers of tokens, as fairseq's `--bpe gpt2` writes them, and `</s>` is the end of
a text. In folders of this package config.json has the flags of training, and dict.txt the words.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq.data import Dictionary
from safetensors.torch import save_file
from torch import Tensor

from fairseq_fwp.convert.checkpoint import build, dictionaries, make_task, new_folder
from fairseq_fwp.convert.conversion import Conversion
from fairseq_fwp.options import Settings
from fairseq_fwp.patches.checkpoints import KEY, fingerprints
from fairseq_fwp.pretrained.dictionary import DICTIONARY
from fairseq_fwp.pretrained.folder import CONFIG, WEIGHTS, read_config


def numbers_of_tokens(
    name: str, sizes: Sequence[str], defaults: Settings, path: Path, vocabulary: Path | None
) -> list[str]:
    """The words of the dictionary: the numbers of the tokens, in their order, and </s> for the end of a text."""
    if vocabulary is not None:
        raise ValueError(f"--vocabulary must be left out with {name}: its words are numbers of tokens")
    config = read_config(path, name, sizes, defaults)
    words = [str(number) for number in range(config["vocab_size"])]
    if config["eos_token_id"] is not None:
        words[config["eos_token_id"]] = "</s>"
    return words


def write_model(conversion: Conversion, out: Path) -> None:
    """Write a language model of this package, for `fairseq_fwp.load` and --source fwp-lm, or nothing.

    Raises ValueError if the folder exists and is not empty, and if the weights do not fit the model of the flags.
    """
    if isinstance(conversion.words, dict):
        raise ValueError(f"the model must be a language model to be written as safetensors, got {conversion.arch}")
    model, (dictionary,) = build(conversion), dictionaries(conversion).values()
    # Each parameter once, although the input and the output may share it.
    names = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    flags = {name: value for name, value in conversion.flags.items() if value is not None}
    of_words = {"vocab_size": len(dictionary), KEY: fingerprints(make_task(conversion))}
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
