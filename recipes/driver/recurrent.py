"""A published softmax model becomes recurrent within a given time, and is compared with its source by one protocol.

`adapted`: the softmax model learns the text. Then another attention takes the place of softmax. `attention`: every
attention learns from the softmax model. `distribution`: the model learns its distribution. `words`: it learns the words
of the text. The teacher is the adapted model if that is better than the source.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from arguments import ROOT, Parser, Request, request_of, whole_number
from commands import CommandError, RecipeError, check_same, run, whole, write
from data import tokens
from data.prepare import SPLITS, Data, find, known_as, preprocess_text, read_lines, remove, unknown_shares
from data.tokens import Tokenizer
from engine import PLUGIN
from evaluation import score
from flags import refusal, value_of
from language_models import OTHER_FLAGS
from log import read_json
from model import Model
from recipe import STAGES, Recipe
from start import ModelStart
from tables import markdown, mean, read_run, save, show

from fairseq_fwp.cli.logs import read_line

SOURCE, ADAPTED, ATTENTION, DISTRIBUTION, WORDS = "source", "adapted", "attention", "distribution", "words"
# The trainings, with their shares of the time.
SHARES = {ADAPTED: 0.10, ATTENTION: 0.30, DISTRIBUTION: 0.55, WORDS: 0.05}
# The adapted model is the teacher if it has at most this share of the source's loss on the validation text.
GAIN = 0.99
# What a model reads first in a line, see fairseq_fwp/tasks/lines.py, in words.
STARTS = {"word": "from their first word on", "end": "after </s>"}
# Sources of fwp-convert by model_type in config.json.
SOURCES = {"gpt2": "gpt2", **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"), "fwp_lm": "fwp-lm"}
ROWS = {
    SOURCE: "source",
    ADAPTED: "source, fine-tuned on the text",
    "converted": "converted, not trained",
    ATTENTION: "1. attentions learned",
    DISTRIBUTION: "2. distribution learned",
    WORDS: "3. words learned",
}
OWN_TEXT = "--data FOLDER is always your own, see above: it must have train, valid and test."
# Tokens of an update: small updates, and many. Updates of a trial that measures their time.
TOKENS, TRIAL = 2048, 12


def compose(arguments: list[str]) -> Recipe:
    stages = STAGES | {"prepare": "convert and score the source, and write the text in its tokens"}
    parser = Parser({**stages, "sample": "print three texts that the recurrent model writes"}, OTHER_FLAGS, OWN_TEXT)
    add_flags(parser)
    args = parser.parse(arguments)
    args.any_text = args.test = None
    if args.unscored and not args.lines:
        raise RecipeError("--lines must be given with --unscored, which leaves out the first tokens of each line.")
    request = request_of(args)
    if not args.data:
        raise RecipeError("--data FOLDER must be given, with train.txt, valid.txt and test.txt: see --help.")
    source = Published(
        request.out, args.model, args.source or kind_of(args.model), args.data, args.vocabulary, args.end, args.lines,
        args.unscored or 0,
    )  # fmt: skip
    trainings = Trainings(request, source, args.rule, args.state_size, args.keep_softmax_layers)
    start = Stages(trainings, args.minutes)
    models = trainings.of_all_seeds()
    measures = Measures(source, start, request)
    table = Losses(request.out, source, start, measures)
    return Recipe(request, models, source, start, [measures], table, "fwp-eval-lm", partial(sample, table))


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="PATH", help="the source: a folder, see above, or a checkpoint")
    add("--source", metavar="NAME", help="the code that wrote it, as for fwp-convert (default: by config.json)")
    add("--data", type=Path, metavar="FOLDER", help="folder with the text, see above")
    add("--lines", action="store_true", help="each line of the text is a sequence of its own (default: one stream)")
    unscored = "with --lines: choose models by the loss without the first N tokens of a line, unknown to the source (0)"
    add("--unscored", type=whole_number, metavar="N", help=unscored)
    add("--vocabulary", type=Path, metavar="FILE", help="names of the tokens, one a line (default: its vocab.txt)")
    add("--end", metavar="TOKEN", help="token that ends a text, by name or number (default: eos_token_id)")
    add("--rule", default="gated_delta", metavar="RULE", help="update rule in place of softmax (default: gated_delta)")
    size = "features of a head's keys; more state loses less (default: 32)"
    add("--state-size", type=whole_number, default=32, metavar="M", help=size)
    keep = "layers that keep softmax, numbered from 0, such as 0,3 (default: none)"
    add("--keep-softmax-layers", metavar="LAYERS", help=keep)
    add("--minutes", type=whole_number, default=20, metavar="N", help="time of all trainings (default: 20)")
    add("--seeds", type=whole_number, metavar="N", help="train with the seeds 1 to N")


def kind_of(model: Path) -> str:
    """Return the source of fwp-convert for a folder. Raises RecipeError for any other path."""
    if not model.exists():
        raise RecipeError(f"--model must be the folder of a published model, got {model}, which does not exist.")
    config = model / "config.json"
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        raise RecipeError(
            f"--source must be given for {model}, which has no config.json: see fwp-convert --help."
        ) from None
    if kind not in [*SOURCES]:
        raise RecipeError(
            f"model_type in {config} must be one of {', '.join(SOURCES)}, got {kind!r}; or give --source."
        )
    return SOURCES[kind]


# The source as a softmax model of this plugin, and the text in its tokens.


@dataclass(frozen=True)
class Published(Data):
    """A published model and a text: see `add_flags`.

    by_lines: each line of the text is a sequence of its own; unscored: its first tokens that choose no model.
    """

    model: Path
    kind: str
    text: Path
    vocabulary: Path | None
    end: str | None
    by_lines: bool
    unscored: int

    @property
    def results(self) -> Path:
        """The folder of the source: its conversions and its scores."""
        return self.out / SOURCE

    @property
    def line_start(self) -> str:
        """What the source reads first in a line: what scores better, by `choose_start`."""
        chosen = self.results / "line_start.txt"
        return chosen.read_text(encoding="utf-8").split()[0] if chosen.exists() else next(iter(STARTS))

    @property
    def converted(self) -> Path:
        return self.results / (f"lines_{self.line_start}" if self.by_lines else "stream")

    @property
    def vocabulary_flags(self) -> list[object]:
        return ["--vocabulary", self.converted / "dict.txt"]

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.vocabulary else tokens.read(self.model)

    def flag(self, name: str) -> str:
        """Return a flag of the converted source."""
        return value_of((self.converted / "flags.txt").read_text(encoding="utf-8").split(), name)

    def settings(self) -> str:
        form = "lines" if self.by_lines else "stream"
        named = f"{self.kind} {self.model.absolute()} {self.vocabulary} {self.end} {form}"
        files = sorted(self.model.iterdir()) if self.model.is_dir() else [self.model]
        weights = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        return " ".join([named, known_as(*self.files), *weights])

    @property
    def files(self) -> list[Path]:
        """The three texts. Raises RecipeError if one is missing."""
        found = {split: find(self.text / f"{split}.txt") for split in SPLITS}
        if missing := [split for split, path in found.items() if path is None]:
            raise RecipeError(f"{self.text / missing[0]}.txt is missing: the folder must have train, valid and test.")
        return [path for path in found.values() if path]

    def prepare(self, before_training: bool) -> None:
        self.convert()
        super().prepare(before_training)
        if self.by_lines:
            self.choose_start()

    def convert(self) -> None:
        settings = self.results / "settings.txt"
        if settings.exists():
            check_same(settings, self.settings())
        else:
            write(settings, self.settings() + "\n")
        if not self.converted.is_dir():
            named = {"--vocabulary": self.vocabulary, "--end": self.end}
            flags: list[object] = [word for flag, value in named.items() if value for word in (flag, value)]
            flags += ["--line-start", self.line_start] if self.by_lines else []
            run("fwp-convert", "--source", self.kind, self.model, *flags, "--out", self.converted)

    def write(self, work: Path) -> None:
        """Write the text in tokens of the source. Raises RecipeError if most of them are unknown."""
        (work / "text").mkdir()
        for split, path in zip(SPLITS, self.files, strict=True):
            tokens.write(path, work / "text" / f"{split}.txt", self.tokenizer, self.by_lines, self.end)
        preprocess_text(work / "text", work / "bin", "--srcdict", self.converted / "dict.txt")
        check_known(work / "preprocess.log", self.converted / "dict.txt")
        remove(work / "text" / "train.txt")

    def choose_start(self) -> None:
        """Score the validation text in both ways of reading a line, and choose the better one, for all that follows."""
        if (self.results / "line_start.txt").exists():
            return
        losses = {}
        for start in STARTS:
            scores = self.results / f"start {start}.tsv"
            flags = ["--line-start", start, "--scores", scores]
            score(
                self.converted / "checkpoint.pt", self.results / f"start {start}.json", self.bin, "valid", None, flags
            )
            losses[start] = loss_after(1, scores, start == "end")
        best = min(losses, key=lambda start: losses[start])
        said = ", ".join(f"{STARTS[start]} {loss:.4f}" for start, loss in losses.items())
        words = f"The source reads lines best {STARTS[best]}. Loss of a token after the first word: {said}."
        write(self.results / "line_start.txt", f"{best}\n{words}\n")
        print(words, flush=True)
        self.convert()


def check_known(log: Path, dictionary: Path) -> None:
    """Print the share of tokens that a dictionary lacks. Raises RecipeError if they are most of a text."""
    for file, _, share in unknown_shares(log):
        if share > 50:
            raise RecipeError(
                f"{file.name} must be text in tokens of the source, got {share:g} % that {dictionary} lacks: give "
                "names of tokens between spaces, or a folder with the model's tokenizer.json."
            )
        if share:
            print(f"{file.name}: {share:g} % of the tokens are not in the vocabulary (<unk>)")


def loss_after(words: int, scores: Path, first_is_scored: bool) -> float:
    """Return the mean loss of the tokens of each line after so many words, from a table of fwp-eval-lm; 0 of none."""
    before = words - (not first_is_scored)
    total, count, left = 0.0, 0, before
    with scores.open(encoding="utf-8") as file:
        next(file)
        for line in file:
            _, token, log_prob = line.rstrip("\n").split("\t")
            if left <= 0:
                total, count = total - float(log_prob), count + 1
            left = before if token == "</s>" else left - 1
    return total / count if count else 0.0


# The trainings.


class Trainings(NamedTuple):
    """The trainings of the recipe; rule, state_size, softmax_layers: of the new attention."""

    request: Request
    source: Published
    rule: str
    state_size: int
    softmax_layers: str | None

    @property
    def new_attention(self) -> str:
        """The flags of fwp-convert. Decay begins with memories of all lengths (docs/conversion.md)."""
        flags = f"--decoder-update-rule {self.rule} --state-size {self.state_size}"
        if self.rule == "decay" and self.source.converted.is_dir():
            flags += f" --decay-spans {self.source.flag('--tokens-per-sample')}"
        return flags + (f" --keep-softmax-layers {self.softmax_layers}" if self.softmax_layers else "")

    def named(self, name: str, seed: int | None) -> Model:
        """Return a training, with the model that it starts from."""
        folder = self.request.out / name / ("" if seed is None else f"seed_{seed}")
        before = {ADAPTED: SOURCE, ATTENTION: self.softmax(seed), DISTRIBUTION: ATTENTION, WORDS: DISTRIBUTION}[name]
        target = self.new_attention if name == ATTENTION else ""
        return Model(name, self.request.recipe / "conf" / f"{name}.yaml", folder, seed, before, target)

    def of_all_seeds(self) -> list[Model]:
        """Return the trainings of the first seed in their order, then those of the next one."""
        return [self.named(name, seed) for seed in self.request.seeds for name in SHARES]

    def softmax(self, seed: int | None) -> str:
        """Return the softmax model that others start from and learn from: the adapted one, if that is better."""
        adapted = self.request.out / ADAPTED / ("" if seed is None else f"seed_{seed}")
        losses = [counted_loss(self.source, folder, "valid") for folder in (adapted, self.source.results)]
        return ADAPTED if None not in losses and losses[0] <= GAIN * losses[1] else SOURCE


class Stages(ModelStart):
    """The start of every training: its weights, its teacher, and as many updates as its share of the time allows."""

    def __init__(self, trainings: Trainings, minutes: int) -> None:
        source = trainings.source
        super().__init__(
            trainings.named, source.bin, [], trainings.request.extra,
            architecture=["--task", "language_modeling", "--arch", "fwp_lm"],
        )  # fmt: skip
        self.trainings, self.minutes = trainings, minutes

    def check(self, model: Model) -> None:
        self.sources = {SOURCE: self.trainings.source.converted}
        if model.name == ATTENTION and (
            reason := refusal(["x", "--out", "x", *model.convert.split()], "fwp-linearize")
        ):
            raise RecipeError(f"the new attention cannot be: {reason}.")
        super().check(model)

    def flags(self, model: Model) -> list[str]:
        source = self.trainings.source
        self.sources, self.source = {SOURCE: source.converted}, ["--source", "fwp-lm", *source.vocabulary_flags]
        if model.name == ATTENTION:
            measure(source, self.trainings.request, source.converted / "checkpoint.pt", source.results, ["valid"])
            adapted = self.named(ADAPTED, model.seed).folder
            measure(source, self.trainings.request, self.checkpoint(ADAPTED, model.seed), adapted, ["valid"])
            model = self.named(model.name, model.seed)
        length = int(source.flag("--tokens-per-sample"))
        flags = [*super().flags(model), "--max-tokens", str(max(TOKENS, length))]
        flags += self.extra  # once more: they override the size of a batch
        return flags + self.updates(model, flags)

    def teacher(self, model: Model) -> str:
        return self.trainings.softmax(model.seed) if model.name in (ATTENTION, DISTRIBUTION) else ""

    def updates(self, model: Model, flags: list[str]) -> list[str]:
        """Return the flags of the length of a training; a trial measures the time of an update, once."""
        if value_of(self.extra, "--max-update"):
            return []
        plan = model.folder / "updates.txt"
        if not plan.exists():
            model.folder.mkdir(parents=True, exist_ok=True)
            count = max(TRIAL, int(60 * self.minutes * SHARES[model.name] * self.rate(model, flags)))
            write(plan, f"--minutes {self.minutes} --max-update {count}\n")
        planned = plan.read_text(encoding="utf-8").split()
        check_same(plan, shlex.join(["--minutes", str(self.minutes), *planned[2:]]))
        count = int(planned[-1])
        interval = str(max(1, count // 4))
        return [
            "--max-update", str(count), "--warmup-updates", str(max(1, count // 20)),
            "--validate-interval-updates", interval, "--save-interval-updates", interval,
        ]  # fmt: skip

    def rate(self, model: Model, flags: list[str]) -> float:
        """Return the updates a second of a short trial; its first half does not count."""
        log = model.folder / "trial.log"
        print(f"{model.label}: a trial of {TRIAL} updates measures their time.", flush=True)
        short = ["--max-update", TRIAL, "--log-interval", TRIAL // 2, "--warmup-updates", 1, "--no-save"]
        form = ["--disable-validation", "--log-format", "json", "--save-dir", model.folder / "trial"]
        run("fairseq-train", self.data, *PLUGIN, *flags, *short, *form, log=log)
        lines = map(read_line, log.read_text(encoding="utf-8", errors="replace").splitlines())
        rates = [numbers["ups"] for about, numbers in lines if about == "inner" and numbers.get("ups")]
        if not rates:
            raise RecipeError(f"the trial of {model.label} must log its speed, got none: see {log}.")
        return rates[-1]


def measure(
    source: Published, request: Request, checkpoint: Path, folder: Path, splits: Sequence[str] = ("valid", "test")
) -> None:
    """Score splits, unless they are, by the one protocol of all models: lines as the source reads them, or blocks."""
    flags = [*([] if source.by_lines else ["--context-window", 0]), *request.evaluation_flags]
    for split in splits:
        path, scores = (folder / f"{split}.{form}" for form in ("json", "tsv"))
        own = ["--scores", scores] if source.unscored else []
        if not path.exists() or (own and not scores.exists()):
            score(checkpoint, path, source.bin, split, None, [*flags, *own])


def counted_loss(source: Published, folder: Path, split: str) -> float | None:
    """Return the loss of a split without the tokens that do not count, None without a result."""
    if not source.unscored or not (scores := folder / f"{split}.tsv").exists():
        loss: float | None = read_json(folder / f"{split}.json").get("loss")
        return loss
    return loss_after(source.unscored, scores, source.line_start == "end")


# The evaluation, the table, and what the model writes.


class Measures(NamedTuple):
    """The evaluation of source, adapted, converted and trained models by one protocol."""

    source: Published
    start: Stages
    request: Request

    def check(self, models: Sequence[Model]) -> None:
        """Raise RecipeError in the stage evaluate without a source."""
        if self.request.stage == "evaluate" and not self.source.converted.is_dir():
            raise RecipeError(f"{self.request.out} must have a source, got none: run the stage prepare first.")

    def evaluate(self, model: Model) -> None:
        measure(self.source, self.request, self.source.converted / "checkpoint.pt", self.source.results)
        if model.name == ATTENTION:
            folder = model.folder / "converted"
            try:
                measure(self.source, self.request, folder / "checkpoint.pt", folder, ["test"])
            except CommandError:  # a converted model may give probabilities of zero
                write(folder / "test.json", '{"perplexity": Infinity, "loss": Infinity}\n')
        measure(self.source, self.request, model.folder / "checkpoint_best.pt", model.folder)


class Losses(NamedTuple):
    """The table of all models, and the folder of the best one."""

    out: Path
    source: Published
    start: Stages
    measures: Measures

    def write(self, models: Sequence[Model]) -> None:
        rows = [row for model in [None, *models] for row in self.rows_of(model)]
        lines = [*table(rows), ""]
        if self.source.by_lines and (chosen := self.source.results / "line_start.txt").exists():
            lines.append(chosen.read_text(encoding="utf-8").splitlines()[1])
        save(self.out, "results", rows, lines)
        if best := self.best(models):
            folder = self.publish(best)
            print(f"The recurrent model is in {folder}: fairseq_fwp.load({str(folder)!r}).")

    def rows_of(self, model: Model | None) -> list[dict[str, Any]]:
        """Return the rows of the source (None) or of a training, and of the model that this begins with."""
        folder = model.folder if model else self.source.results
        training, seed = read_run(folder), "" if model is None or model.seed is None else model.seed
        if training.diverged:
            return []
        names = {model.name if model else SOURCE: folder}
        if model and model.name == ATTENTION:
            names = {"converted": folder / "converted", **names}
        rows = []
        for name, of_name in names.items():
            if result := read_json(of_name / "test.json"):
                row = {"model": name, "seed": seed, "state": result.get("state_size"), "loss": result["loss"]}
                row |= {"counted": counted_loss(self.source, of_name, "test")}
                trained = name not in (SOURCE, "converted")
                done = {"updates": training.updates, "hours": training.hours} if trained else {}
                rows.append(row | {"perplexity": result["perplexity"], "updates": "", "hours": ""} | done)
        return rows

    def best(self, models: Sequence[Model]) -> Model | None:
        """Return the recurrent model with the lowest loss on the validation text, of the tokens that count."""
        recurrent = [model for model in models if model.name in (ATTENTION, DISTRIBUTION, WORDS)]
        losses = {model: counted_loss(self.source, model.folder, "valid") for model in recurrent}
        scored = [model for model in recurrent if losses[model] is not None]
        return min(scored, key=lambda model: losses[model], default=None)

    def publish(self, model: Model) -> Path:
        """Write the folder of a model for fairseq_fwp.load, unless it has this model already; return it."""
        folder, holds, checkpoint = (
            self.out / "recurrent",
            self.out / "recurrent.txt",
            model.folder / "checkpoint_best.pt",
        )
        stat = checkpoint.stat()
        name = f"{checkpoint.relative_to(self.out)} {stat.st_size} {stat.st_mtime_ns}\n"
        if not (folder.is_dir() and holds.exists() and holds.read_text(encoding="utf-8") == name):
            with whole(folder) as work:
                source = ["--source", "fwp-lm", *self.source.vocabulary_flags]
                run("fwp-convert", *source, checkpoint, "--to", "safetensors", "--out", work)
                remove(holds)
                remove(folder)
            write(holds, name)
        return folder


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each model, mean and deviation of its seeds, with its share of the source's perplexity."""
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    for row in rows:
        groups[row["model"]].append(row)
    whole = groups[SOURCE][0]["perplexity"] if groups[SOURCE] else None
    lines = []
    for name, seeds in groups.items():
        if seeds:
            several = f", {len(seeds)} seeds" if len(seeds) > 1 else ""
            shares = [100 * whole / row["perplexity"] for row in seeds] if whole else []
            lines.append([
                ROWS[name] + several, show(seeds[0]["state"], 0), mean([row["loss"] for row in seeds], 4),
                mean([row["counted"] for row in seeds], 4), mean([row["perplexity"] for row in seeds], 3),
                f"{mean(shares, 1)} %",
                show(seeds[0]["updates"], 0), mean([row["hours"] for row in seeds]),
            ])  # fmt: skip
    heads = ["model", "state, numbers", "loss of a token, nats", "of those that count", "perplexity"]
    return markdown([*heads, "of the source", "updates", "hours"], lines)


def sample(table: Losses, model: Model) -> None:
    """Print three texts that the recurrent model writes after the first tokens of lines of the test text."""
    source, request = table.source, table.measures.request
    best = table.best(table.start.trainings.of_all_seeds())
    if best is None:
        raise RecipeError("a recurrent model must be evaluated first: run the stage evaluate.")
    lines = [line.split() for line in read_lines(source.folder / "text" / "test.txt") if line]
    prompts, written = [" ".join(line[:2]) for line in lines[:3]], request.out / "prompt.txt"
    write(written, "".join(prompt + "\n" for prompt in prompts))
    log = request.out / "sample.log"
    task = (
        ["--task", "fwp_lines", "--line-start", source.line_start]
        if source.by_lines
        else ["--task", "language_modeling"]
    )
    length = int(source.flag("--tokens-per-sample"))
    run(
        "fairseq-interactive", source.bin, "--user-dir", ROOT / "fairseq_fwp", *task, "--input", written,
        "--path", best.folder / "checkpoint_best.pt", "--sampling", "--beam", 1, "--max-len-b", min(200, length),
        "--tokens-per-sample", length, "--seed", 1, *(flag for flag in request.extra if flag == "--cpu"), log=log,
    )  # fmt: skip
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("H-"):
            words = line.split("\t")[2]
            print(source.tokenizer.decode([int(word) for word in words.split()]) if source.tokenizer else words)
