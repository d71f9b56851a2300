"""Where the weights of a training come from: drawn, those of another model, or those of that model converted.

A teacher, whose outputs a training learns, is another model of the recipe, too.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from commands import RecipeError, check_same, run, write
from engine import PLUGIN
from flags import refusal, value_of
from model import Model


class ModelStart:
    """The start of every training of a recipe.

    named: the model of a name, with a seed; data: the output of fairseq-preprocess; source: flags of fwp-convert for
    models of the recipe; extra: flags of the command line, which override those of a model.
    plugin: flags of another plug-in than this package; architecture: for models whose flags name none before they are
    converted; sources: folders of converted models that are no trainings of the recipe, by name.
    """

    def __init__(
        self,
        named: Callable[[str, int | None], Model],
        data: Path,
        source: Sequence[object],
        extra: Sequence[str],
        *,
        plugin: Sequence[str] = (),
        architecture: Sequence[str] = (),
        sources: Mapping[str, Path] | None = None,
    ) -> None:
        self.named, self.data, self.source, self.extra = named, data, source, extra
        self.plugin, self.architecture, self.sources = plugin, architecture, sources or {}

    def check(self, model: Model) -> None:
        """Raise RecipeError if a model that is named does not exist, or for flags that fairseq-train refuses."""
        for name in filter(None, (model.origin, self.teacher(model))):
            if name not in self.sources:
                self.named(name, model.seed)
        flags = [*self.architecture, *model.flags, *self.plugin, *self.extra]
        plugin = [] if "--user-dir" in flags else PLUGIN
        if reason := refusal([str(self.data), *plugin, *flags]):
            raise RecipeError(f"{model.name}: fairseq-train refuses the flags: {reason}.")

    def flags(self, model: Model) -> list[str]:
        """Return all flags of a training. The model that it begins with is converted first, if it must be."""
        flags = [*model.flags, *self.plugin]
        if model.origin:
            if converted := self.converted(model):
                flags = (converted / "flags.txt").read_text(encoding="utf-8").split() + flags
            begun = converted / "checkpoint.pt" if model.convert else self.checkpoint(model.origin, model.seed)
            flags += ["--finetune-from-model", str(begun)]
        flags += self.extra
        if teacher := self.teacher(model):
            flags += ["--teacher", str(self.checkpoint(teacher, model.seed))]
        return flags

    def converted(self, model: Model) -> Path | None:
        """Return the folder of the converted model, for a model or for the one that it begins with; None if none is."""
        if not model.convert:
            if not model.origin or model.origin in self.sources:
                return self.sources.get(model.origin)
            return self.converted(self.trained(model.origin, model.seed))
        folder, settings = model.folder / "converted", model.folder / "conversion.txt"
        conversion = f"{model.origin} {model.convert}\n"
        if folder.is_dir():
            if settings.exists():
                check_same(settings, conversion)
            return folder
        begun = self.checkpoint(model.origin, model.seed)
        write(settings, conversion)
        run("fwp-convert", *self.plugin, *self.source, begun, "--out", folder, *model.convert.split())
        return folder

    def trained(self, name: str, seed: int | None) -> Model:
        """Return the model of a name; without a seed if it was trained without one."""
        of_seed = self.named(name, seed)
        return of_seed if of_seed.folder.is_dir() else self.named(name, None)

    def checkpoint(self, name: str, seed: int | None) -> Path:
        """Return the best checkpoint of a model. Raises RecipeError if it is not trained, or has diverged."""
        if folder := self.sources.get(name):
            return folder / "checkpoint.pt"
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
