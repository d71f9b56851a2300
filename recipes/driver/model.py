"""The models of a recipe: the YAML files in its conf/, chosen by name, folder or path, each with its seeds."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from arguments import Request, names
from commands import RecipeError
from flags import START, read_conf, read_flags, read_yaml, shaped
from log import Outcome, read_outcome

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


class Models:
    """All models that a recipe has; their output is in the folder `out`."""

    def __init__(self, recipe: Path, out: Path) -> None:
        self.recipe, self.out = recipe, out

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
        return Model(name, conf, self.out / name / ("" if seed is None else f"seed_{seed}"), seed, origin, convert)

    def chosen(self, args: Namespace, request: Request, only: Choice = list) -> list[Model]:
        """Return the models of --models or of --conf, the user's if given, else the recipe's, each with every seed.

        only: those of the names that the recipe trains, in their order. Raises RecipeError if none is named.
        """
        chosen = [] if args.conf else only(self.expand(names(args.models)))
        confs = [self.find_conf(args.conf)] if args.conf else [self.recipe / "conf" / f"{name}.yaml" for name in chosen]
        if not confs and request.stage != "prepare":
            raise RecipeError(
                f"--conf conf/NAME.yaml or --models NAME must be given; names: {', '.join(self.names())}."
            )
        return [self.of_file(conf, seed) for conf in confs for seed in request.seeds]

    def find_conf(self, path: str) -> Path:
        for conf in (Path(path), self.recipe / path):
            if conf.is_file():
                return conf.resolve()
        raise RecipeError(f"--conf must be conf/NAME.yaml, got {path}; names: {', '.join(self.names())}.")

    def expand(self, names: list[str]) -> list[str]:
        """Return names of models; a folder means all in it, in the order of the tables in FOLDER.yaml, if any.

        FOLDER/NAME means those of the table of that name there.
        """
        models, known = [], self.names()
        for name in names:
            folder, _, table = name.partition("/")
            rows = self.recipe / f"{folder}.yaml"
            inside = [other for other in known if other.startswith(f"{name}/")]
            if name in known:
                inside = [name]
            elif rows.exists():
                inside = [f"{folder}/{run}" for run in runs(rows, table)]
            if not inside:
                raise RecipeError(f"--models must be among {', '.join(known)}, got {name}.")
            models += inside
        return list(dict.fromkeys(models))


def runs(path: Path, name: str = "") -> list[str]:
    """Return the runs that rows, or rows of tables, name in a YAML file, each once; name: that of one table."""
    with shaped(path, "recipes/peps/grid.yaml"):
        tables = [table for table in read_yaml(path) if name in ("", table.get("name"))]
        rows = [row for table in tables for row in table.get("rows", [table])]
        return list(dict.fromkeys(row["run"] for row in rows))
