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
from operator import itemgetter
from pathlib import Path

from arguments import Parser, Request, positive, request_of
from commands import RecipeError, check_same, run, whole, write
from data import tokens
from data.prepare import SPLITS, Data, find, known_as, preprocess_text, read_lines, remove, unknown_shares
from data.tokens import Tokenizer
from engine import PLUGIN
from evaluation import Measures, Way, score
from flags import refusal, value_of
from language_models import OTHER_FLAGS, interact
from log import read_json
from model import SOURCE, Model, Models, flags_of, folder_of
from recipe import STAGES, Recipe
from tables import Row, group, markdown, mean, named, read_run, save, show

from fairseq_fwp.cli.logs import read_line

ADAPTED, ATTENTION, DISTRIBUTION, WORDS = "adapted", "attention", "distribution", "words"
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
    prepare = {"prepare": "convert and score the source, and write the text in its tokens"}
    sampled = {"sample": "print three texts that the recurrent model writes"}
    parser = Parser(STAGES | prepare | sampled, OTHER_FLAGS, OWN_TEXT)
    add_flags(parser)
    args = parser.parse(arguments)
    if args.unscored and not args.lines:
        raise RecipeError("--lines must be given with --unscored, which leaves out the first tokens of each line.")
    request = request_of(args)
    if not args.data:
        raise RecipeError("--data FOLDER must be given, with train.txt, valid.txt and test.txt: see --help.")
    source = Published(
        request.out, args.model, args.source or kind_of(args.model), args.data, args.vocabulary, args.end, args.lines,
        args.unscored or 0,
    )  # fmt: skip
    stages = Stages(request, source, args)
    # The trainings of the first seed in their order, then those of the next one.
    chosen = [stages.named(name, seed) for seed in request.seeds for name in SHARES]
    report, write_sample = partial(write_table, source), partial(sample, stages, chosen)
    return Recipe(stages, chosen, [stages.measures], report, "fwp-eval-lm", write_sample)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="PATH", help="the source: a folder, see above, or a checkpoint")
    add("--source", metavar="NAME", help="the code that wrote it, as for fwp-convert (default: by config.json)")
    add("--data", type=Path, metavar="FOLDER", help="folder with the text, see above")
    add("--lines", action="store_true", help="each line of the text is a sequence of its own (default: one stream)")
    unscored = "with --lines: choose models by the loss without the first N tokens of a line, unknown to the source (0)"
    add("--unscored", type=positive, metavar="N", help=unscored)
    add("--vocabulary", type=Path, metavar="FILE", help="names of the tokens, one a line (default: its vocab.txt)")
    add("--end", metavar="TOKEN", help="token that ends a text, by name or number (default: eos_token_id)")
    add("--rule", default="gated_delta", metavar="RULE", help="update rule in place of softmax (default: gated_delta)")
    size = "features of a head's keys; more state loses less (default: 32)"
    add("--state-size", type=positive, default=32, metavar="M", help=size)
    keep = "layers that keep softmax, numbered from 0, such as 0,3 (default: none)"
    add("--keep-softmax-layers", metavar="LAYERS", help=keep)
    add("--minutes", type=positive, default=20, metavar="N", help="time of all trainings (default: 20)")
    add("--seeds", type=positive, metavar="N", help="train with the seeds 1 to N")


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
    def conversion(self) -> list[object]:
        return ["--source", "fwp-lm", "--vocabulary", self.converted / "dict.txt"]

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.vocabulary else tokens.read(self.model)

    @property
    def end_of_text(self) -> str | None:
        """The token that ends a text, as the text has it: in its place the source's dictionary has </s>; None: none."""
        names, config = self.vocabulary or self.model / tokens.NAMES, self.model / "config.json"
        if not names.is_file():
            known = {line.split(" ")[0] for line in read_lines(self.converted / "dict.txt")}
            return next(number for number in map(str, range(len(known) + 1)) if number not in known)
        words, end = list(read_lines(names)), self.end
        if end is None and config.is_file():
            end = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
        return words[int(end)] if str(end).isdecimal() and int(end) < len(words) else end

    @property
    def length(self) -> int:
        """The tokens of a sample of the source."""
        return int(value_of(flags_of(self.converted), "--tokens-per-sample"))

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
            tokens.write(path, work / "text" / f"{split}.txt", self.tokenizer, self.by_lines, self.end_of_text)
        preprocess_text(work / "text", work / "bin", "--srcdict", self.converted / "dict.txt")
        check_known(work / "preprocess.log", self.converted / "dict.txt")
        remove(work / "text" / "train.txt")

    def choose_start(self) -> None:
        """Score the validation text in both ways of reading a line, and choose the better one, for all that follows."""
        if (self.results / "line_start.txt").exists():
            return
        losses, checkpoint = {}, self.converted / "checkpoint.pt"
        for start in STARTS:
            path = self.results / f"start {start}.json"
            flags = ["--line-start", start, "--scores", path.with_suffix(".tsv")]
            score(checkpoint, path, self.bin, "valid", None, flags)
            losses[start] = loss_after(1, path.with_suffix(".tsv"), start == "end")
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


class Stages(Models):
    """The trainings: their weights, their teacher, and as many updates as their share of the time allows.

    given: see `add_flags`.
    """

    def __init__(self, request: Request, source: Published, given: argparse.Namespace) -> None:
        super().__init__(request, source)
        self.given, self.minutes = given, given.minutes
        self.measures = Measures(self, partial(ways, source))

    def named(self, name: str, seed: int | None) -> Model:
        """Return a training, with the model that it starts from."""
        before = {ADAPTED: SOURCE, ATTENTION: self.softmax(seed), DISTRIBUTION: ATTENTION, WORDS: DISTRIBUTION}[name]
        conf, folder = self.recipe / "conf" / f"{name}.yaml", folder_of(self.out, name, seed)
        return Model(name, conf, folder, seed, before, self.new_attention if name == ATTENTION else "")

    @property
    def new_attention(self) -> str:
        """The flags of fwp-convert. Decay begins with memories of all lengths (docs/conversion.md)."""
        kept = self.given.keep_softmax_layers
        flags = f"--decoder-update-rule {self.given.rule} --state-size {self.given.state_size}"
        if self.given.rule == "decay" and self.data.converted.is_dir():
            flags += f" --decay-spans {self.data.length}"
        return flags + (f" --keep-softmax-layers {kept}" if kept else "")

    def softmax(self, seed: int | None) -> str:
        """Return the softmax model that others start from and learn from: the adapted one, if that is better."""
        folders = folder_of(self.out, ADAPTED, seed), self.data.results
        losses = [counted_loss(self.data, folder, "valid") for folder in folders]
        return ADAPTED if None not in losses and losses[0] <= GAIN * losses[1] else SOURCE

    def check(self, model: Model) -> None:
        flags = ["x", "--out", "x", *model.convert.split()]
        if model.name == ATTENTION and (reason := refusal(flags, "fwp-linearize")):
            raise RecipeError(f"the new attention cannot be: {reason}.")
        super().check(model)

    def convert(self, model: Model) -> Path | None:
        return super().convert(self.named(model.name, model.seed))  # what it starts from may be known only now

    def begin(self, model: Model) -> list[str]:
        if model.name == ATTENTION:
            checkpoints = {
                self.data.results: self.data.converted / "checkpoint.pt",
                self.named(ADAPTED, model.seed).folder: self.checkpoint(ADAPTED, model.seed),
            }
            _, valid = ways(self.data)
            for folder, checkpoint in checkpoints.items():
                self.measures.measure(folder, checkpoint, valid)
            model = self.named(model.name, model.seed)
        flags = [*super().begin(model), "--max-tokens", str(max(TOKENS, self.data.length))]
        flags += self.extra  # once more: they override the size of a batch
        return flags + self.updates(model, flags)

    def teacher(self, model: Model) -> str:
        return self.softmax(model.seed) if model.name in (ATTENTION, DISTRIBUTION) else ""

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
        run("fairseq-train", self.data.bin, *PLUGIN, *flags, *short, *form, log=log)
        lines = map(read_line, log.read_text(encoding="utf-8", errors="replace").splitlines())
        rates = [numbers["ups"] for about, numbers in lines if about == "inner" and numbers.get("ups")]
        if not rates:
            raise RecipeError(f"the trial of {model.label} must log its speed, got none: see {log}.")
        return rates[-1]


# The evaluation, the table, and what the model writes.


def ways(source: Published) -> list[Way]:
    """Return the one protocol of all models on test and valid: lines as the source reads them, or blocks."""
    reading = "" if source.by_lines else "--context-window 0"
    return [Way("", reading, (split,), scores=bool(source.unscored)) for split in ("test", "valid")]


def counted_loss(source: Published, folder: Path, split: str) -> float | None:
    """Return the loss of a split without the tokens that do not count, None without a result."""
    if source.unscored and (scores := folder / f"{split}.tsv").exists():
        return loss_after(source.unscored, scores, source.line_start == "end")
    return read_json(folder / f"{split}.json").get("loss")


def write_table(source: Published, models: Sequence[Model]) -> None:
    """Write the table of all models, and the folder of the best one."""
    rows = [row for model in [None, *models] for row in rows_of(source, model)]
    lines = [*table(rows), ""]
    if source.by_lines and (chosen := source.results / "line_start.txt").exists():
        lines.append(chosen.read_text(encoding="utf-8").splitlines()[1])
    save(source.out, "results", rows, lines)
    if best := best_of(source, models):
        folder = publish(source, best)
        print(f"The recurrent model is in {folder}: fairseq_fwp.load({str(folder)!r}).")


def rows_of(source: Published, model: Model | None) -> list[Row]:
    """Return the rows of the source (None) or of a training, and of the model that this begins with."""
    folder = model.folder if model else source.results
    training, seed = read_run(folder), "" if model is None or model.seed is None else model.seed
    names, rows = {"converted": folder / "converted", model.name if model else SOURCE: folder}, []
    for name, of_name in names.items() if not training.diverged else ():
        if result := read_json(of_name / "test.json"):
            row = {"model": name, "seed": seed, "state": result.get("state_size"), "loss": result["loss"]}
            row |= {"counted": counted_loss(source, of_name, "test"), "perplexity": result["perplexity"]}
            trained = name not in (SOURCE, "converted")
            row |= {"updates": training.updates if trained else "", "hours": training.hours if trained else ""}
            rows.append(row)
    return rows


def table(rows: list[Row]) -> list[str]:
    """Return a line for each model, mean and deviation of its seeds, with its share of the source's perplexity."""
    groups = group(rows, itemgetter("model"))
    whole = groups[SOURCE][0]["perplexity"] if SOURCE in groups else None
    lines = []
    for name, seeds in ((name, groups[name]) for name in ROWS if name in groups):
        shares = [100 * whole / row["perplexity"] for row in seeds] if whole else []
        state, updates = (show(seeds[0][head], 0) for head in ("state", "updates"))
        digits = {"loss": 4, "counted": 4, "perplexity": 3}
        means = [mean([row[head] for row in seeds], places) for head, places in digits.items()]
        hours = mean([row["hours"] for row in seeds])
        lines.append([named(ROWS[name], seeds), state, *means, f"{mean(shares, 1)} %", updates, hours])
    heads = ["model", "state, numbers", "loss of a token, nats", "of those that count", "perplexity"]
    return markdown([*heads, "of the source", "updates", "hours"], lines)


def best_of(source: Published, models: Sequence[Model]) -> Model | None:
    """Return the recurrent model with the lowest loss on the validation text, of the tokens that count."""
    losses = {model: counted_loss(source, model.folder, "valid") for model in models if model.name != ADAPTED}
    scored = [model for model, loss in losses.items() if loss is not None]
    return min(scored, key=lambda model: losses[model], default=None)


def publish(source: Published, model: Model) -> Path:
    """Write the folder of a model for fairseq_fwp.load, unless it has this model already; return it."""
    folder, holds = source.out / "recurrent", source.out / "recurrent.txt"
    stat = (checkpoint := model.folder / "checkpoint_best.pt").stat()
    name = f"{checkpoint.relative_to(source.out)} {stat.st_size} {stat.st_mtime_ns}\n"
    if not (folder.is_dir() and holds.exists() and holds.read_text(encoding="utf-8") == name):
        with whole(folder) as work:
            run("fwp-convert", *source.conversion, checkpoint, "--to", "safetensors", "--out", work)
            remove(holds)
            remove(folder)
        write(holds, name)
    return folder


def sample(stages: Stages, models: Sequence[Model], first: Model) -> None:
    """Print three texts that the recurrent model writes after the first tokens of lines of the test text."""
    source = stages.data
    best = best_of(source, models)
    if best is None:
        raise RecipeError("a recurrent model must be evaluated first: run the stage evaluate.")
    lines = [line.split() for line in read_lines(source.folder / "text" / "test.txt") if line]
    prompts = [" ".join(line[:2]) for line in lines[:3]]
    task = ["fwp_lines", "--line-start", source.line_start] if source.by_lines else ["language_modeling"]
    length = source.length
    search = ["--beam", 1, "--max-len-b", min(200, length), "--tokens-per-sample", length]
    for words in interact(stages, best, prompts, "H", ["--task", *task, *search]):
        print(source.tokenizer.decode([int(word) for word in words.split()]) if source.tokenizer else words)
