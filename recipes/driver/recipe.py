"""A recipe that trains models: its stages, over four parts that each kind of recipe puts together.

The data, the start of the weights, the ways of evaluation, and the table of results.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import engine
from arguments import Request
from commands import RecipeError, lock
from data.prepare import Data
from engine import Training
from flags import refusal
from model import Model

STAGES = {
    "prepare": "read, download or make the text, and write it in fairseq's format",
    "train": "prepare if needed, then train each model",
    "evaluate": "evaluate each trained model, then report",
    "report": "write the tables and pictures of the finished models",
    "all": "prepare, train, evaluate and report",
}


class Start(Protocol):
    """Where the weights of a training come from."""

    def check(self, model: Model) -> None:
        """Raise RecipeError, before any work, for flags or names that cannot be."""

    def flags(self, model: Model) -> list[str]:
        """Return all flags of the training, and write the weights that it begins with."""


class Evaluation(Protocol):
    """A way of evaluation of trained models."""

    def check(self, models: Sequence[Model]) -> None:
        """Raise RecipeError, before any work, if it cannot evaluate the models."""

    def evaluate(self, model: Model) -> None:
        """Write the results of a model, unless they are there."""


class Table(Protocol):
    """The report of all results."""

    def write(self, models: Sequence[Model]) -> None: ...


class Recipe(NamedTuple):
    """A recipe and what is asked of it. evaluator: the program that gets unknown flags in the stage evaluate.

    sample: print texts that a model writes, and whether the stage all does so.
    """

    request: Request
    models: Sequence[Model]
    data: Data
    start: Start
    evaluations: Sequence[Evaluation]
    table: Table
    evaluator: str
    sample: Callable[[Model], None] | None = None
    samples_in_all: bool = False

    def check(self) -> None:
        """Check everything before any work. Raises RecipeError for flags that a program refuses."""
        request = self.request
        if request.stage == "evaluate" and request.extra:
            flags = [str(self.data.bin), "--path", "checkpoint_best.pt", *request.extra]
            if reason := refusal(flags, self.evaluator):
                raise RecipeError(
                    f"{self.evaluator} refuses the flags: {reason}. In the stage evaluate, flags that are not the "
                    f"recipe's are for {self.evaluator}. Flags for fairseq-train need the stage train or all."
                )
        for model in self.models if request.trains else ():
            self.start.check(model)
        for evaluation in self.evaluations if request.trains or request.evaluates else ():
            evaluation.check(self.models)

    def run(self) -> None:
        """Run the stage that is asked for, or all."""
        request = self.request
        self.check()
        if request.trains or request.stage == "prepare":
            self.data.prepare(before_training=request.trains)
        if not self.data.folder.is_dir():
            raise RecipeError(f"{self.data.folder} must exist: run the stage prepare first.")
        if request.stage == "prepare":
            print(f"The data is in {self.data.folder}. Next: the stage train.")
        for model in self.models if request.trains else ():
            self.train(model)
        if request.stage == "train":
            print("Next: the stage evaluate, with the same --out, and --models, --conf or --seeds if given.")
        for model in self.models if request.evaluates else ():
            self.evaluate(model)
        if (request.evaluates or request.stage == "report") and not request.test:
            self.report()
        if self.sample and (request.stage == "sample" or (request.stage == "all" and self.samples_in_all)):
            self.models[0].check_trained()
            self.sample(self.models[0])

    def train(self, model: Model) -> None:
        engine.train(Training(model.label, model.folder, self.start.flags(model), self.data.bin))

    def evaluate(self, model: Model) -> None:
        if model.outcome and model.outcome.diverged:
            return
        model.check_trained()
        lock(model.folder)
        for evaluation in self.evaluations:
            evaluation.evaluate(model)

    def report(self) -> None:
        lock(self.request.out)
        self.table.write(self.models)
        if left := [model.label for model in self.models if not model.outcome]:
            print(f"Not trained yet: {'; '.join(left)}.")
