"""Recipes of conversion: a softmax model is converted to each row of rows.yaml, fine-tuned and measured."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import engine
from arguments import ROOT, Parser, Request, names, positive, request_of
from commands import RecipeError, run
from data import pile, tokens
from data.prepare import SPLITS, cut, preprocess_text, remove
from data.texts import TextData
from engine import Training
from evaluation import Measures, Way
from flags import read_flags, read_yaml, shaped, value_of
from language_models import OTHER_FLAGS, add_flags_of_text
from log import read_json
from model import SOURCE, Model, Models, flags_of, folder_of
from recipe import STAGES, Recipe
from tables import Row, group, markdown, mean, named, read_run, save, show

SOFTMAX = "softmax"  # the source after as much fine-tuning as the other rows
OWN_TEXT = """\
--data FOLDER --out FOLDER trains on another text. The first folder contains
train.txt, valid.txt and test.txt: raw text."""


class Origin(NamedTuple):
    """Where the source model of a corpus and its text come from.

    format: of the model, as fwp-convert names it; trained: it is trained here, on the recipe's text; else it is given;
    files: names of a raw text of a split; tokenizer: of the model, by its folder, for a text that may be packed as the
    Pile is; None: the text is in words.
    """

    format: str
    trained: bool = False
    files: tuple[str, ...] = ("{}.txt",)
    tokenizer: Callable[[Path], tokens.Tokenizer] | None = None


ORIGINS = {
    "peps": Origin("fairseq-lm", trained=True),
    "wikitext103": Origin("fairseq-lm", files=("{}.txt", "wiki.{}.tokens")),
    "gpt2": Origin("gpt2", tokenizer=tokens.read_gpt2),
}


def compose(arguments: list[str]) -> Recipe:
    parser = Parser(
        STAGES | {"prepare": "prepare the text, and train (peps) or convert the source model"}, OTHER_FLAGS, OWN_TEXT
    )
    add_flags_of_text(parser)
    parser.add_argument("--corpus", choices=ORIGINS, default="peps", help="corpus and source model (default: peps)")
    model = "source model: wikitext103: fairseq's checkpoint; gpt2: a folder; see above"
    parser.add_argument("--model", type=Path, metavar="PATH", help=model)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="names of rows in rows.yaml (default: all)")
    updates = "peps: updates of the source model (default: 4000)"
    parser.add_argument("--source-updates", type=positive, metavar="N", help=updates)
    args = parser.parse(arguments)
    request = request_of(args, ROOT / "runs" / args.recipe.name / args.corpus)
    corpus, trained = read_corpus(request.recipe / "rows.yaml", args.corpus), ORIGINS[args.corpus].trained
    if args.model if trained else args.source_updates:
        flag, where = ("--model", "trained here") if trained else ("--source-updates", "given")
        raise RecipeError(f"{flag} must be left out with --corpus {args.corpus}, whose model is {where}.")
    source = Source(
        request.out, args.text, args.data, args.merges, args.lines, args.any_text,
        args.corpus, request.recipe, args.model, args.source_updates,
    )  # fmt: skip
    rows = Rows(request, source, corpus)
    chosen = rows.of_rows(names(args.rows))
    measures = Measures(rows, partial(ways, corpus, source), corpus.checkpoint)
    report = partial(write_table, corpus, measures)
    return Recipe(rows, chosen, [measures], report, evaluator="fwp-eval-lm")


# The rows.


class Corpus(NamedTuple):
    """A corpus of rows.yaml, which explains the fields."""

    measures: list[str]
    rows: list[Row]
    source: dict[str, float]
    start: str = SOURCE
    checkpoint: str = "best"
    tokens: int | None = None


def read_corpus(path: Path, name: str) -> Corpus:
    """Return a corpus, whose `stages` are rows that are not compared with a paper."""
    with shaped(path, "recipes/decay_finetune/rows.yaml"):
        fields = read_yaml(path, plain=False)[name]
        stages = fields.pop("stages", [])
        return Corpus(**fields | {"rows": fields["rows"] + stages})


class Rows(Models):
    def __init__(self, request: Request, source: "Source", corpus: Corpus) -> None:
        super().__init__(request, source, ["--user-dir", str(request.recipe / "mao_ablations")])
        self.corpus, self.conf = corpus, request.recipe / "conf" / source.corpus

    def named(self, name: str, seed: int | None) -> Model:
        """Return the training of a row. Its own `conf` and `from` are for rows that learn in stages."""
        row = next((row for row in self.corpus.rows if row["run"] == name), {})
        conf = self.conf / f"{row.get('conf', 'finetune')}.yaml"
        origin = SOURCE if name == SOFTMAX else row.get("from", self.corpus.start)
        return Model(name, conf, folder_of(self.out, name, seed), seed, origin, row.get("target", ""))

    def of_rows(self, names: list[str]) -> list[Model]:
        """Return the trainings of the rows of these names, by default of all, with that which the others start from."""
        known, start = [row["run"] for row in self.corpus.rows], self.corpus.start
        for name in names:
            if name not in known:
                raise RecipeError(f"--rows must be among {', '.join(dict.fromkeys(known))}, got {name}.")
        rows = [*([SOFTMAX] if start == SOFTMAX else []), *(names or known)]
        models = [self.named(name, None if name == start else seed) for name in rows for seed in self.request.seeds]
        return list(dict.fromkeys(models))


# The source as a softmax model of this plugin, and the text in its words.


@dataclass(frozen=True)
class Source(TextData):
    """The text of a corpus, and its source model, which is trained (peps) or given, and converted.

    model: its path, if it is given; updates: those of its training, by default those of source.yaml.
    """

    corpus: str
    recipe: Path
    model: Path | None
    updates: int | None

    @property
    def origin(self) -> Origin:
        return ORIGINS[self.corpus]

    @property
    def converted(self) -> Path:
        return self.out / SOFTMAX / "converted"

    def prepare(self, before_training: bool) -> None:
        if self.origin.trained:
            super().prepare(before_training)
            self.train()
        elif not self.model or not self.model.exists():
            raise RecipeError(f"--model must be the source of --corpus {self.corpus}, got none: see --help.")
        else:
            self.convert(self.model)
            super().prepare(before_training)

    def settings(self) -> str:
        return super().settings() if self.origin.trained else f"{self.lines or 'all'} lines of valid and test"

    def train(self) -> None:
        flags, folder = read_flags(self.recipe / "conf" / "peps" / "source.yaml"), self.out / SOURCE
        if self.updates:  # a tenth of them is warm-up, as in source.yaml
            flags += ["--max-update", str(self.updates), "--warmup-updates", str(self.updates // 10)]
        engine.train(Training(SOURCE, folder, flags, self.bin))
        self.convert(folder / "checkpoint_best.pt", "--vocabulary", self.bin / "dict.txt")

    def convert(self, model: Path, *flags: object) -> None:
        if not self.converted.is_dir():
            run("fwp-convert", "--source", self.origin.format, model, *flags, "--out", self.converted)

    def write(self, work: Path) -> None:
        """Write the text in the words of the source."""
        if self.origin.trained:
            super().write(work)
            return
        text, pieces = work / "text", work / "bpe"
        for folder in (text, pieces):
            folder.mkdir()
        for split in SPLITS:
            self.write_raw(split, text / f"{split}.txt")
        if self.lines:
            cut(text, self.lines)
        for name in (f"{split}.txt" for split in SPLITS):
            if self.origin.tokenizer:
                tokens.write(text / name, pieces / name, self.origin.tokenizer(self.model), by_lines=False)
            else:
                (text / name).replace(pieces / name)
        remove(text)
        preprocess_text(pieces, work / "bin", "--srcdict", self.converted / "dict.txt")
        remove(pieces / "train.txt")

    def write_raw(self, split: str, out: Path) -> None:
        """Write the raw text of a split. Raises RecipeError without one."""
        folder = self.own_folder or ROOT / "data" / "peps"
        files = [folder / name.format(split) for name in self.origin.files]
        if self.origin.tokenizer and (packed := pile.files(folder, split)):
            pile.write(packed, out)
        elif path := next(filter(Path.is_file, files), None):
            out.write_bytes(path.read_bytes())
        else:
            raise RecipeError(f"{files[-1]} is missing: give --data FOLDER, see --help.")


def ways(corpus: Corpus, source: Source) -> list[Way]:
    """Return the ways of the measures, "SPLIT CONTEXT"; by default samples are as long as those of the source."""
    length = corpus.tokens or value_of(flags_of(source.converted), "--tokens-per-sample")
    reading = f"--tokens-per-sample {length} --context-window"
    return [Way(context, f"{reading} {context}", (split,)) for split, context in map(str.split, corpus.measures)]


# The table.


def write_table(corpus: Corpus, measures: Measures, models: Sequence[Model]) -> None:
    """Write the table of all rows of a corpus. Of a row that has diverged the converted model is measured."""
    for model in models:
        if model.outcome and model.outcome.diverged:
            measures.evaluate_converted(model)
    rows = read_results(corpus, measures.models.out)
    save(measures.models.out, "results", rows, table(corpus, rows))


def read_results(corpus: Corpus, out: Path) -> list[Row]:
    """Return the results of the source, then of each row that has any; None: not measured."""
    found = [read_row(SOURCE, out / SOFTMAX / "converted", corpus.measures)]
    for name in (row["run"] for row in corpus.rows):
        folders = [out / name, *sorted((out / name).glob("seed_*"))]
        found += [read_row(name, folder, corpus.measures) for folder in folders]
    return [row for row in found if any(row[name] is not None for name in row.keys() - {"run", "seed"})]


def read_row(run: str, folder: Path, measures: list[str]) -> Row:
    """Return the results of a training, by the columns of the CSV; None if nothing was measured."""
    training, seed = read_run(folder), folder.name.removeprefix("seed_")
    before, after = (read_json(at / f"{measures[0]}.json") for at in (folder / "converted", folder))
    row = {"run": run, "seed": int(seed) if seed != folder.name else None}
    row |= {"state": before.get("state_size") or after.get("state_size")}
    row |= {"updates": training.updates, "hours": training.hours}
    row |= {f"converted, {measures[0]}": before.get("perplexity")}
    for name in measures:
        row[name] = "diverged" if training.diverged else read_json(folder / f"{name}.json").get("perplexity")
    return row


def shown(value: float | str | None) -> str:
    """Return a perplexity as text for a table; words stay as they are."""
    return f"{value:.1e}" if isinstance(value, float) and value >= 1e5 else show(value, none="not run")


def table(corpus: Corpus, results: list[Row]) -> list[str]:
    """Return the source, then a line for each row, with the shares of its source and of softmax that it recovers.

    A share is the source's perplexity / its own: Mao 2022, Sec. 4.1.4, has 99 % for 14.5 and 14.6.
    """
    seeds, measures, first, rows = group(results, itemgetter("run")), corpus.measures, corpus.measures[0], corpus.rows

    def numbers(run: str, name: str) -> list[float]:
        return [row[name] for row in seeds.get(run, ()) if isinstance(row[name], int | float)]

    def value(run: str, name: str) -> Any:
        """Return the mean of the seeds, or a word."""
        known = numbers(run, name)
        return statistics.mean(known) if known else seeds[run][0][name] if run in seeds else None

    def text(run: str, name: str) -> str:
        known = numbers(run, name)
        # An infinite perplexity has no deviation.
        return mean(known) if len(known) > 1 and max(known) < 1e5 else shown(value(run, name))

    def recovered(whole: Any, part: Any) -> str:
        both = isinstance(whole, int | float) and isinstance(part, int | float)
        return f"{whole / part:.1%}" if both else "-"

    compared = {"of the source": value(corpus.start, first)}
    if corpus.start == SOURCE and any(row["run"] == SOFTMAX for row in rows):
        compared["of softmax, fine-tuned"] = value(SOFTMAX, first)
    # The paper's source, as a separate line or as the row that it fine-tuned.
    paper_source = corpus.source or next((row["paper"] for row in rows if row["run"] == SOFTMAX), {})
    papers = list(dict.fromkeys(measure for row in rows for measure in row["paper"]))
    before = "source" if corpus.start == SOURCE else "before fine-tuning"
    lines = []
    for row in [{"row": before, "run": SOURCE, "paper": corpus.source}, *rows]:
        run, paper, measure = row["run"], row["paper"], next(iter(row["paper"]), None)
        shares = [recovered(whole, value(run, first)) for whole in compared.values()]
        shares.append(recovered(paper_source.get(measure), paper.get(measure)))
        start = shown(value(run, f"converted, {first}"))
        if run == SOURCE:
            start, shares = "-", ["-"] * len(shares)
        state, updates = (show(value(run, head), 0) for head in ("state", "updates"))
        ours, theirs = [text(run, name) for name in measures], [shown(paper.get(name, "-")) for name in papers]
        name = named(row["row"], seeds.get(run, ()))
        lines.append([name, state, start, *ours, *shares[:-1], *theirs, shares[-1], updates])
    heads = ["row", "state", f"converted, {first}", *measures, *compared]
    return markdown([*heads, *(f"paper {name}" for name in papers), "paper, of its source", "updates"], lines)
