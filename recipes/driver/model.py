"""The models of a recipe: the YAML files in its conf/, chosen by name, folder or path, each with its seeds.

The weights of a training are drawn, those of another model, or those of that model converted. A teacher, whose outputs
a training learns, is another model of the recipe, too.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from arguments import Request, names
from commands import RecipeError, check_same, run, write
from data.prepare import Data
from engine import PLUGIN
from flags import START, read_conf, read_flags, read_yaml, refusal, shaped, value_of
from log import Outcome, read_outcome

# The name of the softmax model that a recipe is given or trains first, see `converted` of Data; flags that it has.
SOURCE, ARCHITECTURE = "source", ["--task", "language_modeling", "--arch", "fwp_lm"]
Choice = Callable[[list[str]], list[str]]


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

    @property
    def outcome(self) -> Outcome | None:
        return read_outcome(self.folder)

    def check_trained(self) -> None:
        if self.outcome is None:
            raise RecipeError(f"{self.label} is not trained: run the stage train first.")


def folder_of(out: Path, name: str, seed: int | None) -> Path:
    return out / name / ("" if seed is None else f"seed_{seed}")


class Models:
    """All models that a recipe has, and the start of every training.

    plugin: flags of another plug-in than this package. Flags of the command line override those of a model.
    """

    def __init__(self, request: Request, data: Data, plugin: Sequence[str] = ()) -> None:
        self.request, self.recipe, self.out, self.extra = request, request.recipe, request.out, request.extra
        self.data, self.plugin = data, plugin

    def names(self) -> list[str]:
        folder = self.recipe / "conf"
        paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
        return sorted(str(name) for name in paths if name.name != "common")

    def named(self, name: str, seed: int | None) -> Model:
        """Return the model of a name that a YAML gives. Raises RecipeError if there is none."""
        if name not in self.names():
            raise RecipeError(f"`from` and `teacher` must be among {', '.join(self.names())}, got {name}.")
        return self.of_file(self.recipe / "conf" / f"{name}.yaml", seed)

    def of_file(self, conf: Path, seed: int | None) -> Model:
        folder, lines = self.recipe / "conf", dict(read_conf(conf))
        name = str(conf.relative_to(folder).with_suffix("")) if conf.is_relative_to(folder) else conf.stem
        origin, convert = (lines.get(start, "") for start in START)
        if convert and not origin:
            raise RecipeError(f"{conf} must have a model to convert: add a line `from: NAME`.")
        return Model(name, conf, folder_of(self.out, name, seed), seed, origin, convert)

    def chosen(self, args: Namespace, only: Choice = list) -> list[Model]:
        """Return the models of --models or of --conf, the user's if given, else the recipe's, each with every seed.

        only: those of the names that the recipe trains, in their order. Raises RecipeError if none is named.
        """
        chosen = [] if args.conf else only(self.expand(names(args.models)))
        confs = [self.find_conf(args.conf)] if args.conf else [self.recipe / "conf" / f"{name}.yaml" for name in chosen]
        if not confs and self.request.stage != "prepare":
            raise RecipeError(
                f"--conf conf/NAME.yaml or --models NAME must be given; names: {', '.join(self.names())}."
            )
        return [self.of_file(conf, seed) for conf in confs for seed in self.request.seeds]

    def find_conf(self, path: str) -> Path:
        for conf in (Path(path), self.recipe / path):
            if conf.is_file():
                return conf.resolve()
        raise RecipeError(f"--conf must be conf/NAME.yaml, got {path}; names: {', '.join(self.names())}.")

    def expand(self, wanted: list[str]) -> list[str]:
        """Return names of models; a folder means all in it, in the order of the tables in FOLDER.yaml, if any.

        FOLDER/NAME means those of the table of that name there.
        """
        models, known = [], self.names()
        for name in wanted:
            folder, _, table = name.partition("/")
            inside = [name] if name in known else [other for other in known if other.startswith(f"{name}/")]
            if name not in known and (rows := self.recipe / f"{folder}.yaml").exists():
                inside = [f"{folder}/{run}" for run in runs(rows, table)]
            if not inside:
                raise RecipeError(f"--models must be among {', '.join(known)}, got {name}.")
            models += inside
        return list(dict.fromkeys(models))

    # The start of a training.

    def check(self, model: Model) -> None:
        """Raise RecipeError if a model that is named does not exist, or for flags that fairseq-train refuses."""
        for name in filter(None, (model.origin, self.teacher(model))):
            if not self.is_source(name):
                self.named(name, model.seed)
        flags = [*(ARCHITECTURE if self.data.converted else ()), *model.flags, *self.plugin, *self.extra]
        plugin = [] if "--user-dir" in flags else PLUGIN
        if reason := refusal([str(self.data.bin), *plugin, *flags]):
            raise RecipeError(f"{model.name}: fairseq-train refuses the flags: {reason}.")

    def begin(self, model: Model) -> list[str]:
        """Make what a training begins with, and return all its flags."""
        flags = [*model.flags, *self.plugin]
        if model.origin:
            if converted := self.convert(model):
                flags = flags_of(converted) + flags
            begun = converted / "checkpoint.pt" if model.convert else self.checkpoint(model.origin, model.seed)
            flags += ["--finetune-from-model", str(begun)]
        flags += self.extra
        if teacher := self.teacher(model):
            flags += ["--teacher", str(self.checkpoint(teacher, model.seed))]
        return flags

    def is_source(self, name: str) -> bool:
        return name == SOURCE and self.data.converted is not None

    def convert(self, model: Model) -> Path | None:
        """Convert what a model begins with, if asked, once; return the folder of that, or of its origin's, or None."""
        if not model.convert:
            if self.is_source(model.origin):
                return self.data.converted
            return self.convert(self.trained(model.origin, model.seed)) if model.origin else None
        folder, settings = model.folder / "converted", model.folder / "conversion.txt"
        conversion = f"{model.origin} {model.convert}\n"
        if folder.is_dir():
            if settings.exists():
                check_same(settings, conversion)
            return folder
        begun = self.checkpoint(model.origin, model.seed)
        write(settings, conversion)
        run("fwp-convert", *self.plugin, *self.data.conversion, begun, "--out", folder, *model.convert.split())
        return folder

    def trained(self, name: str, seed: int | None) -> Model:
        """Return the model of a name; without a seed if it was trained without one."""
        of_seed = self.named(name, seed)
        return of_seed if of_seed.folder.is_dir() else self.named(name, None)

    def checkpoint(self, name: str, seed: int | None) -> Path:
        """Return the best checkpoint of a model. Raises RecipeError if it is not trained, or has diverged."""
        if self.is_source(name):
            return self.data.converted / "checkpoint.pt"
        model = self.trained(name, seed)
        because = "because other models start from it or learn from it"
        if model.outcome is None:
            raise RecipeError(f"{model.label} must be trained first, {because}: name it earlier in --models.")
        if model.outcome.diverged:
            another = "train it in another --out, for example with a smaller --lr"
            raise RecipeError(f"{model.label} must not have diverged, {because}: {another}.")
        return model.folder / "checkpoint_best.pt"

    def teacher(self, model: Model) -> str:
        """Return the model that `teacher` in a YAML names; empty if there is none, or if it is a file."""
        name = value_of([*model.flags, *self.extra], "--teacher")
        return "" if Path(name).is_file() else name


def flags_of(converted: Path) -> list[str]:
    return (converted / "flags.txt").read_text(encoding="utf-8").split()


def runs(path: Path, name: str = "") -> list[str]:
    """Return the runs that rows, or rows of tables, name in a YAML file, each once; name: that of one table."""
    with shaped(path, "recipes/peps/grid.yaml"):
        tables = [table for table in read_yaml(path) if name in ("", table.get("name"))]
        rows = [row for table in tables for row in table.get("rows", [table])]
        return list(dict.fromkeys(row["run"] for row in rows))
