"""BLEU of what fairseq-generate printed, as people report it, after checking that every sentence is there.

    python recipes/mt_scores.py score GENERATE_LOG --tokenized REFERENCE [--raw REFERENCE] --language de --out FILE.json
    python recipes/mt_scores.py csv OUT NAME...    # the numbers of the runs OUT/NAME
    python recipes/mt_scores.py table CSV    # these numbers -> Markdown

Three numbers, none comparable with another: *sacreBLEU*, of detokenised text with sacrebleu's own tokens, under its
signature (Post 2018); *tokenised*, of the recipe's tokens, as multi-bleu.perl counts; *compound-split*, the same after
words with hyphens are split at them on both sides, as Vaswani et al. 2017 and Ott et al. 2018 report WMT14 En-De.
"""

import argparse
import csv
import json
import re
import sys
from pathlib import Path

from lm_results import read_training
from sacrebleu.metrics import BLEU
from sacremoses import MosesDetokenizer

HYPOTHESIS = re.compile(r"^H-(\d+)\t[^\t]*\t(.*)$", re.MULTILINE)
SUMMARY = re.compile(r"Translated ([\d,]+) sentences \(([\d,]+) tokens\) in ([\d.]+)s")
# That of the literature's scripts, without look-around: of "a-b-c" they split the first hyphen alone.
COMPOUND = re.compile(r"(\S)-(\S)")


def read_hypotheses(log: Path) -> list[str]:
    """The best hypothesis of each sentence, in the order of the data set; ValueError where one is missing or twice."""
    found: dict[int, str] = {}
    for number, text in HYPOTHESIS.findall(log.read_text(encoding="utf-8")):
        if int(number) in found:
            raise ValueError(f"{log} has several hypotheses of sentence {number}: generate with --nbest 1.")
        found[int(number)] = text
    if sorted(found) != list(range(len(found))):
        missing = next(number for number in range(max(found)) if number not in found)
        raise ValueError(f"{log}: sentence {missing} was not translated: nothing is reported.")
    return [found[number] for number in range(len(found))]


def read_speed(log: Path) -> dict[str, float]:
    """The sentences, tokens and seconds that fairseq-generate reports, unless they went to standard error."""
    found = SUMMARY.search(log.read_text(encoding="utf-8"))
    if not found:
        return {}
    sentences, tokens, seconds = (float(number.replace(",", "")) for number in found.groups())
    return {"sentences": int(sentences), "tokens": int(tokens), "seconds": seconds}


def split_compounds(line: str) -> str:
    return COMPOUND.sub(r"\1 ##AT##-##AT## \2", line)


def tokenized_bleu(hypotheses: list[str], references: list[str]) -> float:
    """As multi-bleu.perl: tokens as they stand, no smoothing."""
    return BLEU(tokenize="none", smooth_method="none", force=True).corpus_score(hypotheses, [references]).score


def read_references(path: Path, count: int) -> list[str]:
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if len(lines) != count:
        raise ValueError(f"{count:,} sentences were translated, but {path} has {len(lines):,}: nothing is reported.")
    return lines


def score(log: Path, tokenized: Path, raw: Path | None, language: str) -> dict[str, object]:
    """The scores of one log, with the speed."""
    hypotheses = read_hypotheses(log)
    references = read_references(tokenized, len(hypotheses))
    speed = read_speed(log)
    if speed.get("sentences", len(hypotheses)) != len(hypotheses):
        raise ValueError(
            f"{log} has {len(hypotheses):,} hypotheses of {speed['sentences']:,} sentences: generate again."
        )
    result: dict[str, object] = {
        "sentences": len(hypotheses),
        **speed,
        "tokenised": tokenized_bleu(hypotheses, references),
        "compound_split": tokenized_bleu(
            *([split_compounds(line) for line in side] for side in (hypotheses, references))
        ),
    }
    if raw is not None:
        detokenizer, metric = MosesDetokenizer(language), BLEU()
        detokenized = [detokenizer.detokenize(line.split()) for line in hypotheses]
        result["sacrebleu"] = metric.corpus_score(detokenized, [read_references(raw, len(hypotheses))]).score
        result["signature"] = str(metric.get_signature())
    return result


def write_csv(out: Path, names: list[str]) -> None:
    """A line for each run OUT/NAME with train.log, valid.json and test.json; without raw text there is no sacreBLEU."""
    heads = ["model", "parameters", "valid_sacrebleu", "test_sacrebleu", "test_tokenised", "test_compound_split"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*heads, "updates", "hours", "signature"])
    for name in names:
        training = read_training(out / name / "train.log")
        valid, test = (json.loads((out / name / f"{split}.json").read_text()) for split in ("valid", "test"))
        scores = [valid.get("sacrebleu"), test.get("sacrebleu"), test["tokenised"], test["compound_split"]]
        signature = test.get("signature") or valid.get("signature")
        writer.writerow([name, training.parameters, *scores, training.updates, training.hours, signature])


def table(path: Path) -> list[str]:
    """The lines of a table of what `write_csv` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    heads = ["model", "parameters", "valid sacreBLEU", "test sacreBLEU", "test tokenised", "test compound-split"]
    lines = ["| " + " | ".join([*heads, "updates", "hours"]) + " |", "| --- |" + " ---: |" * (len(heads) + 1)]
    for row in rows:
        bleu = [row[head.replace(" ", "_").replace("-", "_").lower()] for head in heads[2:]]
        scores = [f"{float(score):.2f}" if score else "no raw text" for score in bleu]
        size, updates = (f"{int(row[name]):,}" for name in ("parameters", "updates"))
        lines.append("| " + " | ".join([row["model"], size, *scores, updates, f"{float(row['hours']):.2f}"]) + " |")
    return [*lines, "", "sacreBLEU: " + ", ".join(sorted({row["signature"] for row in rows} - {""}))]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    one = stages.add_parser("score")
    one.add_argument("log", type=Path)
    one.add_argument("--tokenized", type=Path, required=True)
    one.add_argument("--raw", type=Path)
    one.add_argument("--language", required=True)
    one.add_argument("--out", type=Path, required=True)
    several = stages.add_parser("csv")
    several.add_argument("folder", type=Path)
    several.add_argument("names", nargs="+")
    stages.add_parser("table").add_argument("csv", type=Path)
    args = parser.parse_args(arguments)
    if args.stage == "csv":
        write_csv(args.folder, args.names)
        return
    if args.stage == "table":
        print("\n".join(table(args.csv)))
        return
    result = score(args.log, args.tokenized, args.raw, args.language)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        ", ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in result.items()
        )
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"mt_scores.py: {error}")
