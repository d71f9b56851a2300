"""Small problems of state tracking and recall: train models, and report the share of right answers."""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean

from flags import as_flags, read_yaml, shaped
from grid import Grid, Training
from log import read_training
from tables import markdown, save

ALWAYS = {
    "task": "fwp_sequence_problems",
    "criterion": "label_smoothed_cross_entropy",
    "report-accuracy": True,
    "num-workers": 0,
    "no-save": True,
    "log-format": "json",
    "log-interval": 100,
}


class Problems(Grid):
    def read(self, conf: Path) -> Iterator[Training]:
        """Yield the trainings of models on problems. `chance` of a problem: right answers of a guess, in %."""
        plan = read_yaml(conf, plain=False)
        with shaped(conf, "conf/quick.yaml"):
            for problem, asked in plan["problems"].items():
                for model, seed in product(asked["models"], plan["seeds"]):
                    name = f"{problem}/" + re.sub(r"[^\w.]+", "_", f"{model}-{seed}")
                    flags = ALWAYS | plan["common"] | asked["flags"] | plan["models"][model] | {"seed": seed}
                    about = {"problem": problem, "model": model, "seed": seed, "chance": asked["chance"]}
                    yield Training(name, self.out / name, as_flags(flags), about)

    def report(self, finished: list[Training]) -> None:
        """Write all evaluations, and a table of the means of the last ones."""
        rows, last = [], {}
        for training in finished:
            asked = training.about
            curve = read_training(training.folder / "train.log").curve("accuracy")
            about = {head: asked[head] for head in ("problem", "model", "seed")}
            rows += [about | {"updates": update, "accuracy": accuracy} for update, accuracy in curve]
            last.setdefault((asked["problem"], asked["model"]), []).append(curve[-1][1])
        chances = {training.about["problem"]: training.about["chance"] for training in finished}
        names = list(dict.fromkeys(training.about["model"] for training in finished))
        rules = [name.partition(",")[0] for name in names]
        cells = [["a guess", *(f"{chance:.1f}" for chance in chances.values())]]
        # A rule and its options together.
        for model in sorted(names, key=lambda name: (rules.index(name.partition(",")[0]), name)):
            found = (last.get((problem, model)) for problem in chances)
            cells.append([model, *(f"{mean(values):.1f}" if values else "-" for values in found)])
        save(self.out, "accuracy", rows, markdown(["model", *chances], cells))
