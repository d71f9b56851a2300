"""Compare models at ten times the quick start's updates, each at its best learning rate of three, over several seeds.

    python recipes/quickstart/long_training.py rates|seeds|table [--out FOLDER] [--models delta sum ...] [--seeds 1 2 3]

`rates` trains each model for 2,000 updates at each learning rate; `seeds` trains it for 20,000 at the best of them, and
evaluates it; `table` writes OUT/long.csv, a row for each run, and prints means and deviations. Each run is one call of
run.sh, printed, in a folder of its own; what is done is not done again, and what was interrupted goes on. Several
processes can share the work: give each its own --models.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lm_results import read_log, read_training

HERE = Path(__file__).resolve().parent
MODELS = ("delta", "sum", "softmax", "gated", "decay")
RATES = ("0.0015", "0.003", "0.006")
RATE_UPDATES = 2000


def run(stage: str, out: Path, *flags: str) -> None:
    """Run a stage of run.sh in the folder `out`, which shares the text of the folder above its parent."""
    out.mkdir(parents=True, exist_ok=True)
    data = out / "data"
    if stage != "prepare" and not data.is_symlink():
        data.symlink_to(out.parents[1] / "data")
    command = ["bash", str(HERE / "run.sh"), stage, "--out", str(out), *flags]
    print("+ " + " ".join(command), file=sys.stderr, flush=True)
    if subprocess.run(command).returncode:
        sys.exit("long_training.py: the command above failed; the same stage goes on once that is repaired.")


def train_rates(out: Path, model: str) -> None:
    for rate in RATES:
        flags = ("--lr", rate, "--max-update", str(RATE_UPDATES), "--warmup-updates", "100")
        run("train", out / "rates" / f"{model}-{rate}", "--models", f"long/{model}", *flags)


def validation(folder: Path, model: str) -> float:
    """Return the best validation perplexity of a run in training."""
    log = folder / "long" / model / "train.log"
    return min(perplexity for _, perplexity in read_training(log).validations)


def best_rate(out: Path, model: str) -> str:
    for rate in RATES:
        results = out / "rates" / f"{model}-{rate}" / "long" / model
        if not (results / "trained").exists() and not (results / "diverged").exists():
            sys.exit(f"long_training.py: {model} was not trained at the rate {rate}: run the stage rates first.")
    return min(RATES, key=lambda rate: validation(out / "rates" / f"{model}-{rate}", model))


def train_seed(out: Path, model: str, seed: int) -> None:
    folder, chosen = out / "seeds" / f"{model}-{seed}", ("--models", f"long/{model}")
    run("train", folder, *chosen, "--lr", best_rate(out, model), "--seed", str(seed))
    run("eval", folder, *chosen)


def rows(out: Path, models: list[str]) -> list[dict[str, object]]:
    """Return a row for each finished run: those of the rates have a validation perplexity only."""
    found: list[dict[str, object]] = []
    for part in ("rates", "seeds"):
        for folder in sorted((out / part).glob("*-*")):
            model, last = folder.name.split("-")
            results = folder / "long" / model
            if model not in models or not (results / "trained").exists():
                continue
            training = read_training(results / "train.log")
            row: dict[str, object] = {
                "model": model,
                "lr": last if part == "rates" else best_rate(out, model),
                "seed": 1 if part == "rates" else last,
                "updates": training.updates,
                "parameters": training.parameters,
                "hours": f"{training.hours:.3f}",
                "best_valid_ppl_in_training": validation(folder, model),
            }
            for split in ("valid", "test"):
                log = results / f"{split}.ppl.log"
                row[f"{split}_ppl"] = f"{2 ** read_log(log)[2]:.4f}" if log.exists() else ""
            found.append(row)
    return found


def table(out: Path, models: list[str]) -> None:
    found = rows(out, models)
    if not found:
        sys.exit(f"long_training.py: no run has finished in {out}: begin with the stage rates.")
    with (out / "long.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)
    print("| model | lr | seeds | valid | test |", "| --- | ---: | ---: | ---: | ---: |", sep="\n")
    for model in models:
        runs = [row for row in found if row["model"] == model and row["test_ppl"]]
        if runs:
            cells = [spread([float(str(row[f"{split}_ppl"])) for row in runs]) for split in ("valid", "test")]
            print(f"| {model} | {runs[0]['lr']} | {len(runs)} | {' | '.join(cells)} |")


def spread(values: list[float]) -> str:
    """Return the mean, with the standard deviation of a single run where there are several."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["rates", "seeds", "table"])
    parser.add_argument("--out", type=lambda path: Path(path).absolute(), default=HERE.parents[1] / "runs" / "long")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    if args.stage == "table":
        table(args.out, args.models)
        return
    if args.stage == "seeds":
        for model in args.models:
            best_rate(args.out, model)  # before any work
    run("prepare", args.out)
    for seed in args.seeds if args.stage == "seeds" else [1]:
        for model in args.models:
            if args.stage == "rates":
                train_rates(args.out, model)
            else:
                train_seed(args.out, model, seed)


if __name__ == "__main__":
    main()
