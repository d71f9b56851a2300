"""A recipe that trains models: its stages, over three parts that each kind of recipe puts together.

The models with their data and the start of their weights, the ways of evaluation, and the table of results.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import engine
from commands import RecipeError, lock
from engine import Training
from evaluation import Evaluation
from flags import refusal
from model import Model, Models

STAGES = {
    "prepare": "read, download or make the text, and write it in fairseq's format",
    "train": "prepare if needed, then train each model",
    "evaluate": "evaluate each trained model, then report",
    "report": "write the tables and pictures of the finished models",
    "all": "prepare, train, evaluate and report",
}


class Recipe(NamedTuple):
    """A recipe and what is asked of it.

    chosen: the models that are asked for; write_table: the report of all results; evaluator: the program that gets
    unknown flags in the stage evaluate; sample: print texts that a model writes, and whether the stage all does so.
    """

    models: Models
    chosen: Sequence[Model]
    evaluations: Sequence[Evaluation]
    write_table: Callable[[Sequence[Model]], None]
    evaluator: str
    sample: Callable[[Model], None] | None = None
    samples_in_all: bool = False

    def check(self) -> None:
        """Check everything before any work. Raises RecipeError for flags that a program refuses."""
        request = self.models.request
        if request.stage == "evaluate" and request.extra:
            flags = [str(self.models.data.bin), "--path", "checkpoint_best.pt", *request.extra]
            if reason := refusal(flags, self.evaluator):
                raise RecipeError(
                    f"{self.evaluator} refuses the flags: {reason}. In the stage evaluate, flags that are not the "
                    f"recipe's are for {self.evaluator}. Flags for fairseq-train need the stage train or all."
                )
        for model in self.chosen if request.trains else ():
            self.models.check(model)
        for evaluation in self.evaluations if request.trains or request.evaluates else ():
            evaluation.check(self.chosen)

    def run(self) -> None:
        """Run the stage that is asked for, or all."""
        request, data = self.models.request, self.models.data
        self.check()
        if request.trains or request.stage == "prepare":
            data.prepare(before_training=request.trains)
        if not data.folder.is_dir():
            raise RecipeError(f"{data.folder} must exist: run the stage prepare first.")
        if request.stage == "prepare":
            print(f"The data is in {data.folder}. Next: the stage train.")
        for model in self.chosen if request.trains else ():
            self.train(model)
        if request.stage == "train":
            print("Next: the stage evaluate, with the same --out, and --models, --conf or --seeds if given.")
        for model in self.chosen if request.evaluates else ():
            self.evaluate(model)
        if (request.evaluates or request.stage == "report") and not request.test:
            self.report()
        if self.sample and (request.stage == "sample" or (request.stage == "all" and self.samples_in_all)):
            self.chosen[0].check_trained()
            self.sample(self.chosen[0])

    def train(self, model: Model) -> None:
        engine.train(Training(model.label, model.folder, self.models.begin(model), self.models.data.bin))

    def evaluate(self, model: Model) -> None:
        if model.outcome and model.outcome.diverged:
            return
        model.check_trained()
        lock(model.folder)
        for evaluation in self.evaluations:
            evaluation.evaluate(model)

    def report(self) -> None:
        lock(self.models.out)
        self.write_table(self.chosen)
        if left := [model.label for model in self.chosen if not model.outcome]:
            print(f"Not trained yet: {'; '.join(left)}.")
