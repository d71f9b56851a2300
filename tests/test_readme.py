"""The texts for people: their links lead somewhere, and the front page names what the tables hold."""

import itertools
import re
from pathlib import Path

from pairwise import looped

from fairseq_fwp.models.attention_options import rule_choices
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS

ROOT = Path(__file__).parents[1]
TEXTS = [
    path
    for folder in ("", "docs", "fairseq_fwp", "cuda_ext", "recipes", "tests")
    for path in (ROOT.glob("*.md") if not folder else (ROOT / folder).rglob("*.md"))
]
GUIDE = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "cuda_ext/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LONGEST_SENTENCE = 30
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def anchors(text):
    """The names that headings get: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def expanded(pattern):
    """All that `{a,b}_c[_d]` stands for."""
    parts = re.split(r"(\{[^}]*\}|\[[^\]]*\])", pattern)
    choices = [
        part[1:-1].split(",") if part[:1] == "{" else ["", part[1:-1]] if part[:1] == "[" else [part] for part in parts
    ]
    return {"".join(choice) for choice in itertools.product(*choices)}


def sentences(text):
    """The sentences of a page, each cell of a table and each item of a list by itself, without code and addresses."""
    text = re.sub(r"^```.*?^```|^    .*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\|(.*)\|$", lambda row: row[1].replace("|", "\n\n") + "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(?:[-*]|\d+\.|#+) ", "\n\n", text, flags=re.MULTILINE)
    return [
        " ".join(sentence.split())
        for paragraph in re.split(r"\n\s*\n", text)
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z*])", paragraph)
        if sentence.strip()
    ]


@looped("path", TEXTS)
def test_links_lead_to_what_is_there(path):
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        other = path.parent / target if target else path
        assert other.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(other.read_text(encoding="utf-8")), f"{target} has no heading #{anchor}"


def test_the_front_page_names_every_rule_map_and_architecture():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    values = [value for row in rows for value in re.findall(r"`([^`]*)`", row)]
    named = {name for value in values for name in expanded(value.removeprefix("--arch "))}
    words = set(" ".join(values).split())
    assert not {name for presets in PRESETS_OF_MODELS.values() for name in presets} - named
    assert not {*rule_choices(), *FEATURE_MAPS} - words


@looped("path", GUIDE)
def test_the_guide_has_short_sentences(path):
    for sentence in sentences(path.read_text(encoding="utf-8")):
        assert len(sentence.split()) <= LONGEST_SENTENCE, f"{len(sentence.split())} words: {sentence}"


def test_sentences_are_told_apart():
    text = "# A title\n\nOne two, `three four`.\nFive [six](x.md) seven.\n- eight\n\n| a b | c |\n```bash\nx y z\n```\n"
    assert sentences(text) == ["A title", "One two, Code.", "Five six seven.", "eight", "a b", "c"]
