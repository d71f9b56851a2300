"""The recipes of translation, on small text of the same layout; no network is there."""

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import mt_average
import mt_scores
import mt_text
import pytest
import torch
import yaml
from flags import read_flags
from sacrebleu.metrics import BLEU

ROOT = Path(__file__).parents[2]
WORDS = [("the", "die"), ("well-known", "bekannte"), ("memory", "Erinnerung"), ("reads", "liest"), ("once", "einmal")]
WORDS += [("token", "Zeichen"), ("it's", "es ist"), ("late", "spät"), ("&", "und"), ("“big”", "„groß“")]
SMALL = [f"--{side}-{size}" for side in ("encoder", "decoder") for size in ("layers", "embed-dim", "ffn-embed-dim")]
SMALL = [word for flag, value in zip(SMALL, (1, 16, 16) * 2, strict=True) for word in (flag, str(value))]
SMALL += ["--encoder-attention-heads", "2", "--decoder-attention-heads", "2", "--max-tokens", "200", "--cpu"]


@pytest.fixture
def recipes(tmp_path):
    """A copy of the recipes that runs in the environment of the tests."""
    copy = tmp_path / "recipes"
    shutil.copytree(ROOT / "recipes", copy, ignore=shutil.ignore_patterns("results", "__pycache__"))
    (copy / "env.sh").write_text(f'root={str(ROOT)!r}\nrun() {{ echo "+ $*" >&2; "$@"; }}\n')
    return copy


def run(script, *arguments):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(script), *map(str, arguments)]
    return subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)


def write_pairs(prefix, count, packed=False):
    """Invented sentences and their translations word by word."""
    chooser = random.Random(str(prefix))
    pairs = [[chooser.choice(WORDS) for _ in range(chooser.randint(1, 9))] for _ in range(count)]
    for side, language in enumerate(("en", "de")):
        text = "".join(" ".join(words[side] for words in pair) + ".\n" for pair in pairs)
        if packed:
            Path(f"{prefix}.{language}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            Path(f"{prefix}.{language}").write_text(text)


@pytest.fixture
def wmt14(tmp_path):
    """A folder like that of the unpacked archives: corpora a folder deeper, and a test set in SGML."""
    folder = tmp_path / "wmt14"
    (folder / "training").mkdir(parents=True)
    for name, count in (("europarl-v7", 120), ("commoncrawl", 90), ("news-commentary-v9", 30)):
        write_pairs(folder / "training" / f"{name}.de-en", count)
    write_pairs(folder / "newstest2013", 21)
    write_pairs(tmp_path / "test", 23)
    for language, side in (("en", "src"), ("de", "ref")):
        lines = (tmp_path / f"test.{language}").read_text().splitlines()
        segments = "".join(f'<seg id="{number}"> {line} </seg>\n' for number, line in enumerate(lines))
        sgm = f'<doc docid="a">\n<p>\n{segments}</p>\n</doc>\n'
        (folder / f"newstest2014-deen-{side}.{language}.sgm").write_text(sgm)
    return folder


@pytest.mark.slow
def test_wmt14_from_raw_text_to_scores(recipes, wmt14, tmp_path):
    script, out = recipes / "wmt14_en_de" / "run.sh", tmp_path / "an out"
    refused = run(script, "prepare", "--data", wmt14, "--out", out)
    assert refused.returncode == 1 and "train has 240 pairs in place of 4,520,620" in refused.stderr
    assert "--any-text" in refused.stderr and not (out / "data").exists()

    arguments = ["--conf", "conf/delta_dpfp4.yaml", "--out", out]
    train = ["train", *arguments, "--data", wmt14, "--any-text", *SMALL, "--max-update", "6", "--update-freq", "1"]
    train += ["--save-interval-updates", "2", "--validate-interval-updates", "2", "--warmup-updates", "2"]
    trained = run(script, *train)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (out / "data" / "text" / "test.de").read_text() == (tmp_path / "test.de").read_text()
    again = run(script, *train)
    assert again.returncode == 0 and "fairseq-train" not in again.stderr

    for options, label in (([], ""), (["--average", "2", "--lenpen", "1"], " average of 2 lenpen 1")):
        scored = run(script, "eval", *arguments, *options, "--cpu")
        assert scored.returncode == 0, scored.stderr
        valid, test = (
            json.loads((out / "delta_dpfp4" / f"{split}{label}.json").read_text()) for split in ("valid", "test")
        )
        assert (valid["sentences"], test["sentences"]) == (21, 23)
        assert test["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
        assert {"sacrebleu", "tokenised", "compound_split"} <= test.keys()


@pytest.mark.slow
def test_wmt14_from_the_public_tokenised_set(recipes, tmp_path):
    folder, out = tmp_path / "public", tmp_path / "out"
    folder.mkdir()
    write_pairs(folder / "train.tok.clean.bpe.32000", 60)
    for name, count in (("newstest2013", 9), ("newstest2014", 8)):
        write_pairs(folder / f"{name}.tok.bpe.32000", count)
        shutil.copy(folder / f"{name}.tok.bpe.32000.en", folder / f"{name}.en")
        shutil.copy(folder / f"{name}.tok.bpe.32000.de", folder / f"{name}.de")
    refused = run(recipes / "wmt14_en_de" / "run.sh", "prepare", "--data", folder, "--out", out)
    assert refused.returncode == 1 and "valid has 9 pairs in place of 3,000" in refused.stderr
    prepared = run(recipes / "wmt14_en_de" / "run.sh", "prepare", "--data", folder, "--out", out, "--any-text")
    assert prepared.returncode == 0, prepared.stderr
    assert (out / "data" / "bin" / "train.en-de.en.bin").exists()
    assert (
        "subword-nmt" not in prepared.stderr and len((out / "data" / "text" / "test.de").read_text().splitlines()) == 8
    )


@pytest.mark.slow
def test_multi30k_from_raw_text_to_a_table(recipes, tmp_path):
    folder, out = tmp_path / "multi30k", tmp_path / "out"
    folder.mkdir()
    for name, count in (("train", 200), ("val", 12), ("test_2016_flickr", 11)):
        write_pairs(folder / name, count, packed=True)
    script = (recipes / "multi30k" / "run.sh").read_text().replace("merges=4000", "merges=40")
    (recipes / "multi30k" / "run.sh").write_text(script)
    flags = [*SMALL, "--max-update", "4", "--warmup-updates", "1", "--validate-interval-updates", "2"]
    # As a shell completes the name of a folder.
    arguments = ["all", "--data", f"{folder}/", "--out", out, "--models", "softmax", "favor", *flags]
    done = run(recipes / "multi30k" / "run.sh", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (out / "table.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in rows[2:4]] == ["| softmax", "| favor"] and rows[-1].startswith(
        "sacreBLEU: nrefs:1"
    )
    assert (out / "table.md").read_text() in done.stdout
    write_pairs(tmp_path / "my own", 7)
    own = ["eval", "--out", out, "--models", "favor", "--test", tmp_path / "my own", "--cpu"]
    scored = run(recipes / "multi30k" / "run.sh", *own)
    assert scored.returncode == 0, scored.stderr
    result = json.loads((out / "favor" / "own_my own.json").read_text())
    assert result["sentences"] == 7 and "sacrebleu" in result
    assert (
        f"favor is evaluated already: {out / 'favor' / 'own_my own.json'}"
        in run(recipes / "multi30k" / "run.sh", *own).stdout
    )
    write_pairs(tmp_path / "my own", 8)
    other = run(recipes / "multi30k" / "run.sh", *own)
    assert other.returncode == 1 and "has other text than" in other.stderr
    (tmp_path / "odd.en").write_text("one\n")
    (tmp_path / "odd.de").write_text("eins\nzwei\n")
    odd = run(recipes / "multi30k" / "run.sh", *own[:5], "--test", tmp_path / "odd")
    assert odd.returncode == 1 and "different numbers of lines" in odd.stderr
    assert not list((out / "tests").glob("*.unfinished"))
    again = run(recipes / "multi30k" / "run.sh", "prepare", "--data", folder, "--out", out)
    assert again.returncode == 0 and "+" not in again.stderr, again.stderr


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("multi30k", ["tain"], "there is no stage tain"),
        ("multi30k", ["prepare", "--out", "unused"], "give --data FOLDER"),
        ("multi30k", ["eval", "--out", "/nonexistent"], "run the stage prepare first"),
        ("multi30k", ["train", "--test", "x"], "--test PREFIX goes with eval"),
        ("multi30k", ["eval", "--test", "mt/nope", "--out", "/x"], "there is neither mt/nope.en nor mt/nope.en.gz"),
        ("multi30k", ["all", "--models"], "--models needs a value"),
        ("multi30k", ["all", "--models", "sum softmx"], "there is no model softmx"),
        ("wmt14_en_de", [], "there is no stage ''"),
        ("wmt14_en_de", ["prepare", "--any-text"], "give that too"),
        ("wmt14_en_de", ["prepare", "--data=x"], "write --data and its value as two words"),
        ("wmt14_en_de", ["train", "--save-dir", "x"], "set by the recipe"),
        ("wmt14_en_de", ["prepare", "--data", "/nonexistent", "--out", "unused"], "there is no folder /nonexistent"),
    ],
)
def test_wrong_arguments_are_explained(recipes, tmp_path, recipe, arguments, message):
    arguments = [str(tmp_path / "out") if word == "unused" else word for word in arguments]
    result = run(recipes / recipe / "run.sh", *arguments)
    assert result.returncode == 1 and message in result.stderr


@pytest.mark.parametrize("packed", [False, True])
def test_text_is_tokenised_pair_by_pair(tmp_path, packed, capsys):
    write_pairs(tmp_path / "a", 5, packed)
    ending = ".gz" if packed else ""
    write = gzip.compress if packed else bytes
    # What Python takes for ends of lines besides \n; an empty side; a long one.
    (tmp_path / f"b.en{ending}").write_bytes(write(("It's\u2028one \x0b line.\n\n" + "many " * 50 + "\n").encode()))
    (tmp_path / f"b.de{ending}").write_bytes(write("Eine Zeile\x85.\nleer\nzu lang\n".encode()))
    out = tmp_path / "new" / "both"
    mt_text.main(["tokenize", str(out), "en", "de", str(tmp_path / "a"), str(tmp_path / "b"), "--max-words", "40"])
    assert capsys.readouterr().out == "both: 6 pairs, 2 left out\n"
    english, german = (Path(f"{out}.{language}").read_text().split("\n") for language in ("en", "de"))
    assert len(english) == len(german) == 7 and "It &apos;s one line ." in english
    with pytest.raises(ValueError, match="both has no pairs: all 3 were left out"):
        mt_text.main(["tokenize", str(out), "en", "de", str(tmp_path / "b"), "--max-words", "3"])
    mt_text.main(["copy", str(out), "en", "de", str(tmp_path / "a"), "--pairs", "5"])
    assert Path(f"{out}.de").read_text().count("\n") == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "there is neither"),
        (["longer"], "have different numbers of lines"),
        (["empty"], "pair 2 of out has an empty side"),
        (["nothing"], "out has no pairs"),
        (["fine", "--pairs", "4"], "out has 3 pairs in place of 4"),
        (["binary"], "cannot be read as UTF-8 text"),
        (["cut"], "cut.en.gz cannot be read as UTF-8 text"),
        (["damaged"], "damaged.en.gz cannot be read as UTF-8 text"),
    ],
)
def test_text_that_does_not_belong_together_is_refused(tmp_path, monkeypatch, arguments, message):
    texts = {
        "nothing": ("", ""),
        "longer": ("a\n", "b\nc\n"),
        "empty": ("a\n\nc\n", "a\nb\nc\n"),
        "fine": ("a\nb\nc\n",) * 2,
    }
    for name, sides in texts.items():
        for language, text in zip(("en", "de"), sides, strict=True):
            (tmp_path / f"{name}.{language}").write_text(text)
    (tmp_path / "binary.en").write_bytes(b"\xff\xfe\n")
    (tmp_path / "binary.de").write_bytes(b"a\n")
    packed = gzip.compress(random.Random(0).randbytes(500).hex().encode() + b"\n")
    for name, text in (("cut", packed[:-30]), ("damaged", packed[:99] + bytes(99) + packed[198:])):
        (tmp_path / f"{name}.en.gz").write_bytes(text)
        (tmp_path / f"{name}.de").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        mt_text.main(["copy", "out", "en", "de", *arguments])


HYPOTHESES = ["ein well-known Haus steht dort .", "die Erinnerung liest einmal &amp; mehr ."]
REFERENCES = ["ein well-known Haus steht hier .", "die Erinnerung liest einmal &amp; mehr ."]


def generated(tmp_path, lines, sentences=2):
    log = tmp_path / "generate.log"
    summary = f"INFO:fairseq_cli.generate:Translated {sentences:,} sentences (1,234 tokens) in 2.5s (...)\n"
    log.write_text(
        "S-0\tsource\n"
        + "".join(f"H-{number}\t-0.5\t{text}\nD-{number}\t-0.5\tx\n" for number, text in lines)
        + summary
    )
    return log


def test_scores(tmp_path):
    """Three kinds of BLEU of the same sentences, which fairseq prints in any order."""
    log = generated(tmp_path, [(1, HYPOTHESES[1]), (0, HYPOTHESES[0])])
    (tmp_path / "tok.de").write_text("\n".join(REFERENCES) + "\n")
    raw = ["Ein well-known Haus steht hier.", "die Erinnerung liest einmal & mehr."]
    (tmp_path / "raw.de").write_text("\n".join(raw) + "\n")
    result = mt_scores.score(log, tmp_path / "tok.de", tmp_path / "raw.de", "de")
    assert (result["sentences"], result["tokens"], result["seconds"]) == (2, 1234, 2.5)
    detokenized = ["ein well-known Haus steht dort.", "die Erinnerung liest einmal & mehr."]
    assert result["sacrebleu"] == BLEU().corpus_score(detokenized, [raw]).score
    # One word of the first sentence is wrong: n-grams of 6 and 7 tokens.
    precisions = [(5 + 7) / (6 + 7), (3 + 6) / (5 + 6), (2 + 5) / (4 + 5), (1 + 4) / (3 + 4)]
    assert result["tokenised"] == pytest.approx(100 * torch.tensor(precisions).log().mean().exp().item())
    # The hyphen makes two more of them.
    precisions = [(7 + 7) / (8 + 7), (5 + 6) / (7 + 6), (4 + 5) / (6 + 5), (3 + 4) / (5 + 4)]
    assert result["compound_split"] == pytest.approx(100 * torch.tensor(precisions).log().mean().exp().item())
    assert "sacrebleu" not in mt_scores.score(log, tmp_path / "tok.de", None, "de")
    # Standard output alone: fairseq-generate logs its last line to standard error.
    log.write_text("".join(line for line in log.read_text().splitlines(True) if "Translated" not in line))
    alone = mt_scores.score(log, tmp_path / "tok.de", tmp_path / "raw.de", "de")
    assert alone == {name: value for name, value in result.items() if name not in ("tokens", "seconds")}


def test_the_table_comes_from_the_numbers(tmp_path, capsys):
    log = "2026-11-22 01:00:00 | INFO | num. shared model params: 1,234\n"
    for name, scores in (("sum", {"sacrebleu": 31.256, "signature": "nrefs:1"}), ("no_raw", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(log + '2026-11-22 01:36:00 | INFO | x | {"num_updates": "2600"}\n')
        for split in ("valid", "test"):
            result = {"tokenised": 30.5, "compound_split": 30.125, **scores}
            (tmp_path / name / f"{split}.json").write_text(json.dumps(result))
    mt_scores.main(["csv", str(tmp_path), "sum", "no_raw"])
    (tmp_path / "table.csv").write_text(capsys.readouterr().out)
    assert "sum,1234,31.256,31.256,30.5,30.125,2600,0.6,nrefs:1" in (tmp_path / "table.csv").read_text()
    mt_scores.main(["table", str(tmp_path / "table.csv")])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| sum | 1,234 | 31.26 | 31.26 | 30.50 | 30.12 | 2,600 | 0.60 |",
        "| no_raw | 1,234 | no raw text | no raw text | 30.50 | 30.12 | 2,600 | 0.60 |",
        "",
        "sacreBLEU: nrefs:1",
    ]


def test_words_are_split_at_hyphens_as_the_literature_does():
    """Matches do not overlap: hyphens with a single letter or nothing in between are not both split."""
    split = mt_scores.split_compounds
    assert split("state-of-the-art") == " ##AT##-##AT## ".join(["state", "of", "the", "art"])
    assert split("a-b-c x--y - -d e-") == "a ##AT##-##AT## b-c x ##AT##-##AT## -y - -d e-"


@pytest.mark.parametrize(
    ("lines", "sentences", "message"),
    [
        ([(0, "a")], 1, "1 sentences were translated, but .* has 2"),
        ([(0, "a"), (2, "b")], 2, "sentence 1 was not translated"),
        ([(0, "a"), (0, "b")], 2, "several hypotheses of sentence 0"),
        ([(0, "a"), (1, "b")], 3, "2 hypotheses of 3 sentences"),
    ],
)
def test_scores_of_other_sentences_are_refused(tmp_path, lines, sentences, message):
    (tmp_path / "tok.de").write_text("\n".join(REFERENCES) + "\n")
    with pytest.raises(ValueError, match=message):
        mt_scores.score(generated(tmp_path, lines, sentences), tmp_path / "tok.de", None, "de")


def test_the_mean_of_the_last_checkpoints(tmp_path):
    for epoch, update in ((1, 5), (1, 90), (2, 100)):
        model = {"weight": torch.full((2,), float(update)), "half": torch.ones(1).half(), "draws": torch.tensor(update)}
        torch.save({"model": model, "args": Namespace(lr=1), "cfg": {}}, tmp_path / f"checkpoint_{epoch}_{update}.pt")
    torch.save({}, tmp_path / "checkpoint_best.pt")
    paths = mt_average.last_checkpoints(tmp_path, 2)
    assert [path.name for path in paths] == ["checkpoint_1_90.pt", "checkpoint_2_100.pt"]
    command = [sys.executable, ROOT / "recipes/mt_average.py", tmp_path, "2", tmp_path / "mean.pt"]
    subprocess.run(command, check=True)
    model = torch.load(tmp_path / "mean.pt", weights_only=False)["model"]
    assert model["weight"].tolist() == [95.0, 95.0] and model["half"].dtype == torch.float16 and model["draws"] == 100
    with pytest.raises(ValueError, match="has 3 checkpoints of an update"):
        mt_average.last_checkpoints(tmp_path, 4)


WMT14 = sorted(path for path in ROOT.glob("recipes/wmt14_en_de/conf/*.yaml") if path.name != "common.yaml")


@pytest.mark.parametrize("conf", WMT14, ids=lambda path: path.stem)
def test_rows_of_tables_1_and_6(conf):
    """As many features as the header says; a number of the paper and a status."""
    header = conf.read_text().partition("\narch:")[0]
    assert "Schlag et al. 2021" in header and "Status: " in header
    row = yaml.load(conf.read_text(), Loader=yaml.BaseLoader)
    features = 2 * int(row.get("favor-features", 256)) if "favor" in row["arch"] else 128 * int(row.get("dpfp-nu", 4))
    if "favor" in row["arch"] or "dpfp" in row["arch"]:
        assert f"{features} features" in header or "delta" in row["arch"]
    assert row["arch"].endswith("_big") and "--max-tokens" in read_flags(conf)


def test_models_of_multi30k_differ_in_their_attentions_only():
    folder = ROOT / "recipes/multi30k/conf"
    shared, own = read_flags(folder / "common.yaml"), set()
    for conf in set(folder.glob("*.yaml")) - {folder / "common.yaml"}:
        flags = read_flags(conf)
        assert flags[-len(shared) :] == shared
        own |= {flag for flag in flags[: -len(shared)] if flag.startswith("--")}
    assert own == {"--arch", "--attention-bias", "--cross-feature-map", "--favor-features", "--favor-softmax-scale"}
