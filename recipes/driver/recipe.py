"""The common part of recipes that train models: the choice of models, stages, seeds and training data."""

import argparse
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import training
from arguments import ROOT, Parser, names, whole_number
from commands import RecipeError, check_same, lock, run, whole, write
from flags import START, read_conf, read_flags, read_yaml, refusal, shaped, value_of
from prepare import check_own, known_as

STAGES = {
    "prepare": "read, download or make the text, and write it in fairseq's format",
    "train": "prepare if needed, then train each model",
    "evaluate": "evaluate each trained model, then report",
    "report": "write the tables and pictures of the finished models",
    "all": "prepare, train, evaluate and report",
}


class Model(NamedTuple):
    """One training: its name in tables, the YAML of its flags, its folder, and a seed that overrides the YAML's.

    origin: the model that it begins with; convert: arguments of fwp-convert for that model.
    """

    name: str
    conf: Path
    folder: Path
    seed: int | None = None
    origin: str = ""
    convert: str = ""

    @property
    def flags(self) -> list[str]:
        return read_flags(self.conf) + ([] if self.seed is None else ["--seed", str(self.seed)])

    @property
    def label(self) -> str:
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"

    def has(self, mark: str) -> bool:
        """Return whether the training ended as "trained" or "diverged"."""
        return (self.folder / mark).exists()


class Recipe:
    """The stages of a recipe. A kind of recipe defines how to prepare, evaluate and report:

    settings(): the source of the data in words; empty: existing data is always used.
    prepare(work), prepare_test(work): write the data, or the text of --test, into the folder `work`.
    evaluate(model), report(): the results of a model, and tables and pictures of all models.
    conversion_flags(): those of fwp-convert for models of the recipe.
    """

    stages: dict[str, str] = STAGES
    rest = "fairseq-train"
    own_data = ""  # how to use another text, for --help
    plugin: tuple[str, ...] = ()  # flags of another plug-in than this package
    evaluator: str  # the program that gets unknown flags in the stage evaluate

    def __init__(self, arguments: list[str]) -> None:
        parser = Parser(self.stages, self.rest, self.own_data)
        self.add_flags(parser)
        self.args = args = parser.parse(arguments)
        self.recipe, self.stage, self.extra = args.recipe, args.stage, args.extra
        self.out = args.out or self.default_out
        self.data, self.bin = self.out / "data", self.out / "data" / "bin"
        self.models = self.read_models()
        if args.any_text and not args.data:
            raise RecipeError("--data FOLDER must be given with --any-text, which accepts another text there.")
        if args.test and self.stage != "evaluate":
            raise RecipeError(f"--test needs the stage evaluate, got the stage {self.stage}.")
        if args.data and not args.data.is_dir():
            raise RecipeError(f"--data must be a folder, got {args.data}.")

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        models = "names of files in conf/, without .yaml, or of folders there (default: see the stages)"
        parser.add_argument("--models", nargs="+", metavar="NAME", help=models)
        parser.add_argument("--conf", metavar="YAML", help="one model, by its file; instead of --models")
        any_text = "with --data: accept another text than the recipe's"
        parser.add_argument("--any-text", action="store_true", help=any_text)
        parser.add_argument("--test", type=Path, metavar="FILE", help="with evaluate: score this raw text, see below")
        self.add_text_flags(parser)

    def add_text_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the text, some of them hidden: only run.sh gives them."""
        parser.add_argument("--seeds", type=whole_number, metavar="N", help="train each model with the seeds 1 to N")
        parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with the text, see below")

    @property
    def default_out(self) -> Path:
        return ROOT / "runs" / self.recipe.name

    def train(self, model: Model) -> None:
        flags, teacher = [*model.flags, *self.plugin], self.teacher(model)
        if model.origin:
            converted = self.converted(model)
            start = converted / "checkpoint.pt" if model.convert else self.checkpoint(model.origin, model.seed)
            architecture = (converted / "flags.txt").read_text(encoding="utf-8").split()
            flags = [*architecture, *flags, "--finetune-from-model", str(start)]
        flags += self.extra
        if teacher:
            flags += ["--teacher", str(self.checkpoint(teacher, model.seed))]
        training.train(model.folder, self.bin, flags)

    # The model that a training begins with or learns from.

    def converted(self, model: Model) -> Path:
        """Return the folder of the converted model, for a model or for the one that it begins with."""
        if not model.convert:
            return self.converted(self.find_model(model.origin, model.seed))
        folder, settings = model.folder / "converted", model.folder / "conversion.txt"
        said = f"{model.origin} {model.convert}\n"
        if folder.is_dir():
            if settings.exists():
                check_same(settings, said)
            return folder
        start = self.checkpoint(model.origin, model.seed)
        write(settings, said)
        run("fwp-convert", *self.conversion_flags(), start, "--out", folder, *model.convert.split())
        return folder

    def named(self, name: str, seed: int | None) -> Model:
        """Return the model of a name that a YAML gives. Raises RecipeError if there is none."""
        if name not in self.known():
            raise RecipeError(f"`from` and `teacher` must be among {', '.join(self.known())}, got {name}.")
        return self.model(self.recipe / "conf" / f"{name}.yaml", seed)

    def find_model(self, name: str, seed: int | None) -> Model:
        """Return the model of a name; without a seed if it was trained without one."""
        of_seed = self.named(name, seed)
        return of_seed if of_seed.folder.is_dir() else self.named(name, None)

    def checkpoint(self, name: str, seed: int | None) -> Path:
        model = self.find_model(name, seed)
        because = "because other models start from it or learn from it"
        if model.has("diverged"):
            another = "train it in another --out, for example with a smaller --lr"
            raise RecipeError(f"{model.label} must not have diverged, {because}: {another}.")
        if not model.has("trained"):
            raise RecipeError(f"{model.label} must be trained first, {because}: name it earlier in --models.")
        return model.folder / "checkpoint_best.pt"

    def teacher(self, model: Model) -> str:
        """Return the model that `teacher` in a YAML names; empty if there is none, or if it is a file."""
        name = value_of([*model.flags, *self.extra], "--teacher")
        return "" if Path(name).is_file() else name

    # The models.

    def read_models(self) -> list[Model]:
        if self.args.conf:
            confs = [self.find_conf(self.args.conf)]
        else:
            # The user's --models replace the recipe's.
            confs = [self.recipe / "conf" / f"{name}.yaml" for name in self.expand(names(self.args.models))]
        if not confs and self.stage != "prepare":
            raise RecipeError(
                f"--conf conf/NAME.yaml or --models NAME must be given; names: {', '.join(self.known())}."
            )
        return [self.model(conf, seed) for conf in confs for seed in self.seeds]

    @property
    def seeds(self) -> Sequence[int | None]:
        return range(1, self.args.seeds + 1) if self.args.seeds else [None]

    def model(self, conf: Path, seed: int | None) -> Model:
        folder, lines = self.recipe / "conf", dict(read_conf(conf))
        name = str(conf.relative_to(folder).with_suffix("")) if conf.is_relative_to(folder) else conf.stem
        origin, convert = (lines.get(start, "") for start in START)
        if convert and not origin:
            raise RecipeError(f"{conf} must have a model to convert: add a line `from: NAME`.")
        return Model(name, conf, self.out / name / ("" if seed is None else f"seed_{seed}"), seed, origin, convert)

    def find_conf(self, path: str) -> Path:
        for conf in (Path(path), self.recipe / path):
            if conf.is_file():
                return conf.resolve()
        raise RecipeError(f"--conf must be conf/NAME.yaml, got {path}; names: {', '.join(self.known())}.")

    def known(self) -> list[str]:
        """Return the names of all models of the recipe."""
        folder = self.recipe / "conf"
        found = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
        return sorted(str(name) for name in found if name.name != "common")

    def expand(self, given: list[str]) -> list[str]:
        """Return names of models; a folder means all in it, in the order of the tables in FOLDER.yaml, if any."""
        found, known = [], self.known()
        for name in given:
            rows = self.recipe / f"{name}.yaml"
            inside = [other for other in known if other.startswith(f"{name}/")]
            if name in known:
                inside = [name]
            elif not inside:
                raise RecipeError(f"--models must be among {', '.join(known)}, got {name}.")
            elif rows.exists():
                inside = [f"{name}/{run}" for run in runs(rows)]
            found += inside
        return list(dict.fromkeys(found))

    # The stages.

    def check_flags(self) -> None:
        """Check the flags of all models before any work. Raises RecipeError for flags that a program refuses."""
        if self.stage == "evaluate" and self.extra:
            flags = [str(self.bin), "--path", "checkpoint_best.pt", *self.extra]
            if reason := refusal(flags, self.evaluator):
                raise RecipeError(
                    f"{self.evaluator} refuses the flags: {reason}. In the stage evaluate, flags that are not the "
                    f"recipe's are for {self.evaluator}. Flags for fairseq-train need the stage train or all."
                )
        for model in self.models if self.stage in ("train", "all") else ():
            flags = [*model.flags, *self.extra]
            for name in filter(None, (model.origin, self.teacher(model))):
                self.named(name, model.seed)  # check that it exists
            plugin = [] if "--user-dir" in flags else training.PLUGIN
            if reason := refusal([str(self.bin), *plugin, *flags]):
                raise RecipeError(f"{model.name}: fairseq-train refuses the flags: {reason}.")

    def main(self) -> None:
        self.check_flags()
        if self.stage in ("prepare", "train", "all"):
            self.prepare_once()
        if not self.data.is_dir():
            raise RecipeError(f"{self.data} must exist: run the stage prepare first.")
        if self.stage == "prepare":
            print(f"The data is in {self.data}. Next: the stage train.")
        if self.stage in ("train", "all"):
            for model in self.models:
                self.train(model)
        if self.stage == "train":
            print("Next: the stage evaluate, with the same --out, and --models, --conf or --seeds if given.")
        if self.stage in ("evaluate", "all"):
            for model in self.models:
                if not model.has("diverged"):
                    self.check_trained(model)
                    lock(model.folder)
                    self.evaluate(model)
        if self.stage in ("evaluate", "report", "all") and not self.args.test:
            lock(self.out)
            self.report()
            if left := [model.label for model in self.models if not model.has("trained") and not model.has("diverged")]:
                print(f"Not trained yet: {'; '.join(left)}.")

    def prepare_once(self) -> None:
        settings = self.settings()
        if self.data.is_dir():
            if settings:
                check_same(self.data / "source.txt", settings)
            return
        lock(self.out)
        # Compile the kernels meanwhile: most of the preparation uses one core. If it fails, the training says why.
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        build = subprocess.Popen(["fwp-info", "--build"], **quiet) if self.stage != "prepare" else None
        make(self.data, self.prepare, settings)
        if build and build.poll() is None:
            print("The kernels are being compiled, once for this machine.", flush=True)

    def own_test(self, name: str, files: list[Path]) -> Path:
        """Return the folder of the prepared text of --test; RecipeError if that of other files has the same name."""
        folder, settings = self.out / "tests" / name, known_as(*files)
        lock(folder.parent)
        if not folder.is_dir():
            make(folder, self.prepare_own_test, settings)
        check_own(folder, settings, self.args.test)
        return folder

    def prepare_own_test(self, work: Path) -> None:
        self.prepare_test(work)
        if ": 0 sents, " in (work / "preprocess.log").read_text(encoding="utf-8"):
            raise RecipeError(f"--test must be a text of at least one line, got {self.args.test}, which is empty.")

    def check_trained(self, model: Model) -> None:
        if not model.has("trained"):
            raise RecipeError(f"{model.label} is not trained: run the stage train first.")

    @property
    def evaluation_flags(self) -> list[str]:
        """Flags of the command line for the evaluation: all in its own stage, otherwise only that of the device."""
        return self.extra if self.stage == "evaluate" else [flag for flag in self.extra if flag == "--cpu"]


def make(folder: Path, prepare: Callable[[Path], None], settings: str) -> None:
    """Make a folder of data, with its source."""
    with whole(folder) as work:
        work.mkdir()
        prepare(work)
        write(work / "source.txt", settings + "\n")


def runs(path: Path) -> list[str]:
    """Return the runs that rows, or rows of tables, name in a YAML file, each once."""
    with shaped(path, "recipes/peps/grid.yaml"):
        rows = [row for table in read_yaml(path) for row in table.get("rows", [table])]
        return list(dict.fromkeys(row["run"] for row in rows))
