"""BLEU of the output of fairseq-generate, as papers report it, after a check that every sentence is there.

There are three numbers, which cannot be compared with each other. *sacreBLEU* is of detokenised text with sacrebleu's
own tokens, with its signature (Post 2018). *tokenised* is of the recipe's tokens, as multi-bleu.perl counts.
*compound-split* is the same after both sides are split at hyphens, as Vaswani et al. 2017 and Ott et al. 2018 report
WMT14 En-De.
"""

import re
from pathlib import Path

from commands import RecipeError
from sacrebleu.metrics import BLEU
from sacremoses import MosesDetokenizer

HYPOTHESIS = re.compile(r"^H-(\d+)\t[^\t]*\t(.*)$", re.MULTILINE)
# It may be missing: fairseq-generate logs it to standard error.
SUMMARY = re.compile(r"Translated ([\d,]+) sentences \(([\d,]+) tokens\) in ([\d.]+)s")
# As in the scripts of the literature, without look-around: of "a-b-c" they split only the first hyphen.
COMPOUND = re.compile(r"(\S)-(\S)")


def read_hypotheses(log: Path) -> list[str]:
    """Return the best hypothesis of each sentence, in order. Raises RecipeError if one is missing or repeated."""
    found: dict[int, str] = {}
    for number, text in HYPOTHESIS.findall(log.read_text(encoding="utf-8")):
        if int(number) in found:
            raise RecipeError(f"{log} has several hypotheses of sentence {number}: generate with --nbest 1.")
        found[int(number)] = text
    if missing := set(range(max(found, default=-1))) - found.keys():
        raise RecipeError(f"{log}: sentence {min(missing)} was not translated: evaluate again.")
    return [found[number] for number in range(len(found))]


def read_references(path: Path, count: int) -> list[str]:
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if len(lines) != count:
        raise RecipeError(f"{count:,} sentences were translated, but {path} has {len(lines):,}: evaluate again.")
    return lines


def split_compounds(line: str) -> str:
    return COMPOUND.sub(r"\1 ##AT##-##AT## \2", line)


def score(log: Path, tokenized: Path, raw: Path | None, language: str) -> dict[str, object]:
    """Return the scores of one log, with the speed."""
    hypotheses = read_hypotheses(log)
    references = read_references(tokenized, len(hypotheses))
    result: dict[str, object] = {"sentences": len(hypotheses)}
    if summary := SUMMARY.search(log.read_text(encoding="utf-8")):
        sentences, tokens, seconds = (number.replace(",", "") for number in summary.groups())
        if int(sentences) != len(hypotheses):
            raise RecipeError(
                f"{log} has {len(hypotheses):,} hypotheses of {int(sentences):,} sentences: generate again."
            )
        result |= {"tokens": float(tokens), "seconds": float(seconds)}
    # As multi-bleu.perl: tokens as they stand, no smoothing.
    plain = BLEU(tokenize="none", smooth_method="none", force=True)
    result["tokenised"] = plain.corpus_score(hypotheses, [references]).score
    split = [[split_compounds(line) for line in side] for side in (hypotheses, references)]
    result["compound_split"] = plain.corpus_score(split[0], split[1:]).score
    if raw is not None:
        detokenizer, metric = MosesDetokenizer(language), BLEU()
        detokenized = [detokenizer.detokenize(line.split()) for line in hypotheses]
        result["sacrebleu"] = metric.corpus_score(detokenized, [read_references(raw, len(hypotheses))]).score
        result["signature"] = str(metric.get_signature())
    return result
