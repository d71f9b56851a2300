"""Every conversion: a source's options, tensors and words become a checkpoint, dictionaries and flags of fairseq."""

import os
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf
from safetensors import SafetensorError
from torch import Tensor, nn

from fairseq_fwp.ops.arguments import DTYPES
from fairseq_fwp.patches.checkpoints import KEY, fingerprints
from fairseq_fwp.patches.training import system_reason

# The seed of everything that is drawn: repeated conversions give the same model.
SEED = 1

CHECKPOINT, DICTIONARY, FLAGS = "checkpoint.pt", "dict.txt", "flags.txt"

# Names for the end of a line and for unknown words; the first one in a vocabulary counts. <S> and <UNK> are LM1B's.
END_OF_LINE = ("</s>", "<eos>", "<S>")
UNKNOWN = ("<unk>", "<UNK>")

# Words of a language model, or of each language in translation.
Words = list[str] | dict[str, list[str]]


class Option(NamedTuple):
    """An option of the command, such as one of the source's training script. type: bool for a flag."""

    type: Callable[[str], Any]
    help: str
    metavar: str = "X"


class Conversion(NamedTuple):
    """A converted checkpoint.

    flags: of `fairseq-train`, by field of the configuration; weights: by the names of our model;
    words: of the dictionary, after fairseq's special symbols; of translation by language, the source language first;
    notes: sentences for users of the model.
    """

    arch: str
    flags: dict[str, Any]
    weights: dict[str, Tensor]
    words: Words
    notes: list[str]


class Source(NamedTuple):
    """One kind of checkpoint.

    options: by their names in the training script.
    read: path -> tensors, and the options saved with them.
    convert: (tensors, words, options) -> `Conversion`; it raises ValueError that names what cannot be represented.
    words: (path, given) -> the vocabulary, from the given file or else from files next to the checkpoint.
    arch: the model whose attention can be converted.
    """

    options: dict[str, Option]
    read: Callable[[Path], tuple[Mapping[str, Tensor], dict[str, Any]]]
    convert: Callable[[Mapping[str, Tensor], Any, "Options"], Conversion]
    words: Callable[[Path, Path | None], Words]
    arch: str = "fwp_lm"


class Options(dict[str, Any]):
    """The known options of a conversion: given on the command line, or else saved with the checkpoint."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({name: value for name, value in values.items() if value is not None})

    def need(self, name: str) -> Any:
        """The option's value. Raises ValueError if it is neither given nor saved."""
        if name not in self:
            raise ValueError(f"--{name} must be given, as in training: neither the state dict nor its log.txt has it")
        return self[name]

    def numbers(self, name: str) -> list[int]:
        """The comma-separated numbers of an option. Raises ValueError for other text."""
        try:
            return [int(number) for number in str(self[name]).split(",")]
        except ValueError:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} must be whole numbers such as 20000,40000, got {self[name]!r}") from None


class Tensors(dict[str, Tensor]):
    """The tensors of a source without a place in our model yet: each is taken once. ValueErrors name the wrong ones."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"the state dict does not fit a model with these options: it lacks {name}; check the options")

    def take(self, name: str) -> Tensor:
        """Remove a tensor and return it."""
        tensor = self[name]
        if tensor.dtype not in DTYPES:
            quantised = "quantised weights, as those of 8 bits, cannot be converted"
            raise ValueError(f"{name} must be floating-point, got {tensor.dtype}: {quantised}")
        del self[name]
        return tensor

    def numbered(self, name: str) -> list[str]:
        """Return the names that have numbers from 0 on in the braces of `name`, such as tables.{}.weight."""
        return list(takewhile(self.__contains__, map(name.format, count())))

    def take_numbered(self, name: str) -> list[Tensor]:
        """Take all tensors of a name with numbers, see `numbered`; at least the first must be there."""
        return [self.take(found) for found in self.numbered(name) or [name.format(0)]]

    def take_equal(self, name: str, expected: Tensor, option: str) -> None:
        """Take a tensor that is one parameter here with another. Raises ValueError about `option` if they differ."""
        if not torch.equal(self.take(name), expected):
            shared = "after conversion input and output share one tensor, but the checkpoint has two that differ"
            raise ValueError(f"{option} cannot be converted: {shared}")

    def rename(self, table: Mapping[str, str]) -> dict[str, Tensor]:
        """Take all tensors, each by our name. table: patterns of how their names begin -> how ours begin."""
        renamed = {}
        for name in list(self):
            for theirs, ours in table.items():
                if re.match(theirs, name):
                    renamed[re.sub(f"^{theirs}", ours, name)] = self.take(name)
                    break
        if self:
            more = ", ".join(sorted(self))
            raise ValueError(f"the state dict does not fit these options: it has also {more}; check the options")
        return renamed


class Vocabulary(NamedTuple):
    """A vocabulary in fairseq's order, with the same probabilities.

    words: without fairseq's special symbols; rows: of each symbol and word in the source, or -1. Symbols without a
    counterpart have an embedding of zero and a bias of minus infinity, which the output layer reads as a mask. An
    adaptive softmax keeps its clusters; the first one holds these symbols, and grows by their number.
    """

    words: list[str]
    rows: Tensor

    @property
    def added(self) -> int:
        """The number of symbols that the source does not have."""
        return int((self.rows < 0).sum())

    @property
    def notes(self) -> list[str]:
        """Notes for evaluating the model, a sentence each."""
        if self.rows[Dictionary().eos()] >= 0:
            return []
        return [
            f"the vocabulary has no symbol for the end of a line ({', '.join(END_OF_LINE)}), which fairseq-preprocess "
            "adds to every line: the model gives it probability 0, and a loss that counts it is infinite"
        ]

    def place(self, tensor: Tensor, fill: float) -> Tensor:
        """Return a tensor whose rows are words of the source, or of its first cluster, in our order; new rows: fill."""
        rows = self.rows[: len(tensor) + self.added]
        placed = tensor.new_full((len(rows), *tensor.shape[1:]), fill)
        placed[rows >= 0] = tensor[rows[rows >= 0]]
        return placed

    def cutoffs(self, cutoffs: list[int]) -> list[int]:
        """The cutoffs of the same clusters. Raises ValueError if a special symbol is not in the first cluster."""
        last = int(self.rows[: len(self.rows) - len(self.words)].max())
        if cutoffs and last >= cutoffs[0]:
            raise ValueError(
                f"the words for the end of a line and for unknown words must be among the first {cutoffs[0]} words, "
                f"the first cluster, got one as word {last + 1}: give the vocabulary in the order of the training"
            )
        return [cutoff + self.added for cutoff in cutoffs]


def arrange(words: list[str]) -> Vocabulary:
    """Return the vocabulary of words in the order of the source. Raises ValueError for repeated or reserved words."""
    specials = Dictionary()
    numbers = {word: number for number, word in enumerate(words)}
    if len(numbers) < len(words):
        twice = next(word for number, word in enumerate(words) if numbers[word] != number)
        raise ValueError(f"the vocabulary must hold each word once, got {twice!r} twice")
    rows = [-1] * len(specials)
    for index, names in ((specials.eos(), END_OF_LINE), (specials.unk(), UNKNOWN)):
        rows[index] = next((numbers[name] for name in names if name in numbers), -1)
    rest = [word for number, word in enumerate(words) if number not in rows]
    for word in rest:
        if word in specials:
            raise ValueError(f"the vocabulary must not hold {word!r}, which fairseq reserves: rename it")
    return Vocabulary(rest, torch.tensor(rows + [numbers[word] for word in rest]))


def given_words(checkpoint: Path, given: Path | None) -> list[str]:
    """Return the words of a checkpoint that does not hold them: the first word of each line of the given file."""
    if given is None:
        raise ValueError(f"--vocabulary must be given: {checkpoint} does not hold its words")
    try:
        lines = given.read_bytes().decode("utf-8").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the vocabulary {given} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(f"line {number} of the vocabulary {given} must hold a word, got an empty line")
    return [line.split()[0] for line in lines]


def dictionary_words(checkpoint: Path, given: Path | None) -> list[str]:
    """Return the words of a checkpoint of fairseq: from the given dict.txt or folder, or else the one next to it."""
    path = given or (checkpoint if checkpoint.is_dir() else checkpoint.parent)
    path = path / DICTIONARY if path.is_dir() else path
    if given is None and not path.exists():
        raise ValueError(f"{path} does not exist: give the dict.txt of the training with --vocabulary")
    return read_dictionary(path)


def read_dictionary(path: Path) -> list[str]:
    """Return the words of fairseq's dict.txt, without its specials. Raises ValueError for any other file."""
    try:
        dictionary = Dictionary.load(str(path))
    except Exception as error:  # fairseq raises a plain Exception for another encoding
        raise ValueError(f"the dictionary {path} cannot be read: {' '.join(str(error).split())}") from error
    words: list[str] = dictionary.symbols[dictionary.nspecial :]
    return words


def load(path: Path, export: str) -> Any:
    """Load what torch.save wrote. Raises ValueError unless it holds plain data; `export` tells the user what to do."""
    try:
        return torch.load(path, map_location="cpu")
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, OSError) as error:
        found = "must be a complete checkpoint, got a truncated or different file"
        if isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower():
            found = f"holds pickled objects, which could run any code, next to its weights: {export}"
        raise ValueError(f"{path} {found}") from error


def write(conversion: Conversion, out: Path) -> None:
    """Write checkpoint.pt, flags.txt and dict.txt (of translation dict.LANGUAGE.txt) into `out`, or nothing.

    The checkpoint is what fairseq would save before the first update. Raises ValueError if the folder exists and is not
    empty, or if the weights do not fit the model of the flags.
    """
    check_new(out)
    flags, task = command_line(conversion), make_task(conversion)
    cfg = configure(flags, out)
    known = {KEY: fingerprints(task)}
    saved = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": build(conversion, cfg.model, task).state_dict(),
        "criterion": None,
        "optimizer_history": [{"optimizer_name": None, "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": known,
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, **known},
        "last_optimizer_state": None,
    }
    with new_folder(out) as unfinished:
        with (unfinished / CHECKPOINT).open("wb") as file:  # of a path, PyTorch's error lacks the system's reason
            torch.save(saved, file)
        for name, dictionary in dictionaries(conversion).items():
            dictionary.save(str(unfinished / name))
        (unfinished / FLAGS).write_text(" ".join(flags) + "\n", encoding="utf-8")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder that becomes `out`, or what this links to, when the block ends without an error.

    Raises ValueError if `out` holds files, and OSError that names it if it cannot be written.
    """
    check_new(out)
    whole = out.resolve()
    unfinished = whole.with_name(f".{whole.name}-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        os.replace(unfinished, whole)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's writer raises the second
        raise OSError(f"--out {out} could not be written ({system_reason(error)})") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_new(out: Path) -> None:
    """Raise ValueError unless the folder is new or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        found = "holds files" if out.is_dir() else "is a file"
        raise ValueError(f"--out must be a new or empty folder, got {out}, which {found}")


def command_line(conversion: Conversion) -> list[str]:
    """Return the flags of `fairseq-train` that make this model."""
    # Among fairseq's criteria for words, only this one never needs the logits of all words at once. It needs the
    # backend legacy_ddp.
    task, criterion = ["language_modeling"], ["adaptive_loss", "--ddp-backend", "legacy_ddp"]
    if isinstance(conversion.words, dict):
        source, *_, target = [*conversion.words] * 2
        task = ["translation", "--source-lang", source, "--target-lang", target]
        criterion = ["cross_entropy"]  # without options: another criterion would not know them
    found = ["--task", *task, "--arch", conversion.arch]
    for name, value in conversion.flags.items():
        if value is not None and value is not False:
            found += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return [*found, "--criterion", *criterion]


def parse(flags: list[str], data: Path) -> Namespace:
    """Return what `fairseq-train` reads in flags. Raises ValueError where it refuses them."""
    parser = options.get_training_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"fairseq-train refuses the settings of the checkpoint: {message}")

    parser.error = refuse  # instead of printing the usage and ending the process
    args: Namespace = options.parse_args_and_arch(parser, [str(data.absolute()), *flags])
    return args


def configure(flags: list[str], data: Path) -> Any:
    """Return the configuration that `fairseq-train` builds from flags, in half a second, most of it Hydra's."""
    return convert_namespace_to_omegaconf(parse(flags, data))


def dictionaries(conversion: Conversion) -> dict[str, Dictionary]:
    """Return fairseq's dictionaries by the names of their files, the source's first; counts are unknown, set to 1."""
    words, found = conversion.words, dict[str, Dictionary]()
    for language, known in words.items() if isinstance(words, dict) else [("", words)]:
        dictionary = found[f"dict.{language}.txt" if language else DICTIONARY] = Dictionary()
        for word in known:  # the same word may come again, or be a special symbol: fairseq then reads the last one
            dictionary.add_symbol(word, overwrite=True)
    return found


def make_task(conversion: Conversion) -> Namespace:
    """Return the dictionaries as a task for the constructor of a model."""
    source, *_, target = [*dictionaries(conversion).values()] * 2
    return Namespace(source_dictionary=source, target_dictionary=target)


def build_empty(conversion: Conversion, cfg: Any = None, task: Namespace | None = None) -> Any:
    """Return the model with its initial weights; see `build`."""
    if cfg is None:
        args, known = parse(command_line(conversion), Path()), MODEL_DATACLASS_REGISTRY.get(conversion.arch)
        cfg = OmegaConf.structured(known.from_namespace(args)) if known else args
    return ARCH_MODEL_REGISTRY[conversion.arch].build_model(cfg, task or make_task(conversion))


def build(conversion: Conversion, cfg: Any = None, task: Namespace | None = None) -> nn.Module:
    """Build a model with the weights, in the widest of their dtypes. Raises ValueError if they do not fit.

    cfg, task: of the model; None: as the flags say.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: nn.Module = build_empty(conversion, cfg, task)
    weights = conversion.weights
    check_fit(model, weights)
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    model.to(reduce(torch.promote_types, {weights[name].dtype for name in weights.keys() & parameters.keys()}))
    with torch.no_grad():
        for name in weights.keys() & parameters.keys():
            parameters[name].copy_(weights[name])
    # A shared parameter now has the same value under all its names. Loading also masks absent words.
    model.load_state_dict({**model.state_dict(), **{name: weights[name] for name in weights.keys() & buffers.keys()}})
    return model


def check(conversion: Conversion) -> None:
    """Check that the weights fit the model of the flags, built on the meta device; raise ValueError otherwise."""
    with torch.device("meta"):
        model = build_empty(conversion)
    check_fit(model, conversion.weights)


def check_fit(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Raise ValueError naming weights that are missing, too many, of another shape or integers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {**parameters, **dict(model.named_buffers())}
    # A parameter that modules share has several names: one of them is enough.
    given = {id(parameters[name]) for name in weights.keys() & parameters.keys()}
    faults = [f"{name} is missing" for name, parameter in model.named_parameters() if id(parameter) not in given]
    for name, weight in weights.items():
        if name not in known:
            faults.append(f"{name} is not a weight of this model")
        elif known[name].shape != weight.shape:
            faults.append(f"{name} must be {tuple(known[name].shape)}, got {tuple(weight.shape)}")
        elif name in parameters and weight.dtype not in DTYPES:
            faults.append(f"{name} must be floating-point of 16 bits or more, got {weight.dtype}")
    if faults:
        raise ValueError(f"the weights do not fit the model that the options describe: {'; '.join(sorted(faults))}")
