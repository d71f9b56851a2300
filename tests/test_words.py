"""Plain English: short sentences, the field's words, and docstrings that do not begin with "What"."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("fairseq_fwp", "recipes", "tests")
KERNELS = "cuda_ext"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "recipes/*/*.md", "cuda_ext/*.md")
    for path in ROOT.glob(pattern)
)
LONGEST_SENTENCE = 30

# Words to avoid, and what to write instead. Code in backticks and flags are not checked.
WORDS = {
    r"read-?outs?": "output, or retrieved value",
    r"what a key finds": "retrieved value",
    r"mend(s|ed|ing)?": "patch, or fix",
    r"twins?": "emulator, or copy",
    r"swap(s|ped|ping)?": "convert the attention",
    r"misfits?": "incompatible",
    r"adopt(s|ed|ing)?": "override",
    r"learnt": "learned",
    r"anew": "again",
    "alone": "only",
    r"beside": "next to, or compared with",
    r"(?<!there )is no(?! longer)": "must be, or is not",
    r"at hand": "available",
}
AVOIDED = {re.compile(rf"(?<![\w-])(?:{word})(?![\w-])", re.IGNORECASE): instead for word, instead in WORDS.items()}

# Ends of sentences, but not of abbreviations; of paragraphs, items, and lines with columns; of parameters in a line.
END = re.compile(
    r"(?<! al)(?<!Sec)(?<!Secs)(?<!Eq)(?<!Eqs)(?<!App)[.!?][\"')*]*\s+"
    r"|\n\s*\n|:\n|\n\s*(?=[-*] |\d\. |[^\n]*\S  )|;\s+(?=[\w, ]+(?: \([^)]*\))?: )"
)


def files(folder):
    """Return the checked files, C++ of kernels and else Python; this one names the words."""
    suffixes = (".h", ".cpp", ".cuh", ".cu") if folder == KERNELS else (".py",)
    return [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes and path != Path(__file__)]


def docstrings(source):
    """Yield (line, text) of every docstring."""
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(source):
    """Yield (line, text) of every comment; comments in successive lines are one."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), text = token.start, token.string.lstrip("# ")
            if found and (found[-1][1], column) == (line - 1, found[-1][2]):
                text = f"{found.pop()[3]}\n{text}"
            found.append((line, line, column, text))
    return [(line, text) for line, _, _, text in found]


def kernel_comments(source):
    """Return (line, text) of every // comment; comments in successive lines without code are one."""
    found, joined = [], False
    for line, code in enumerate(source.splitlines(), 1):
        before, slashes, text = code.partition("//")
        whole = bool(slashes) and not before.strip()
        if whole and joined:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{text[1:]}")
        elif slashes:
            found.append((line, text[1:]))
        joined = whole
    return found


def messages(source):
    """Yield (line, text) of every string with a space, docstrings included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def without_code(text):
    """Replace code in backticks by one word."""
    return re.sub(r"```.*?```|``.*?``|`[^`]*`", "CODE", text, flags=re.DOTALL)


def begins_with_what(source):
    """Return the lines of docstrings that begin with What."""
    return [line for line, text in docstrings(source) if re.match(r"What\b", text)]


def python_texts(source):
    """Return (line, text) of docstrings and comments."""
    return [*docstrings(source), *comments(source)]


def long_sentences(source, texts=python_texts):
    """Return (line, number of words, sentence) of long sentences in docstrings and comments."""
    return [
        (line, words, " ".join(sentence.split()))
        for line, text in texts(source)
        for sentence in END.split(without_code(text))
        if (words := len(re.findall(r"\S*[A-Za-z]\S*", sentence))) > LONGEST_SENTENCE
    ]


def avoided_words(text):
    """Return (word, what to write instead)."""
    return [(found[0], instead) for word, instead in AVOIDED.items() for found in word.finditer(without_code(text))]


def each(folder, find):
    """Return "file:line: ..." of all that find(source) returns, for the files of a folder."""
    assert files(folder)
    return [
        f"{path.relative_to(ROOT)}:{found}"
        for path in files(folder)
        for found in find(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    """Such as "Return ...", "Compute ..." or "The state of ...", not "What ..."."""
    assert each(folder, begins_with_what) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_are_short(folder):
    assert each(folder, long_sentences) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_words_of_code(folder):
    """In docstrings, comments and, except in tests, messages."""
    parts = (comments, docstrings if folder == "tests" else messages)
    found = each(
        folder,
        lambda source: [(line, *word) for part in parts for line, text in part(source) for word in avoided_words(text)],
    )
    assert found == []


def test_kernels():
    """Short sentences and plain words in the comments of C++ and CUDA."""

    def find(source):
        words = [(line, *word) for line, text in kernel_comments(source) for word in avoided_words(text)]
        return [*words, *long_sentences(source, kernel_comments)]

    assert each(KERNELS, find) == []


@pytest.mark.parametrize("page", PAGES)
def test_words_of_pages(page):
    assert avoided_words((ROOT / page).read_text(encoding="utf-8")) == []


def test_findings():
    """The checks find what they are for, and only whole words."""
    source = '"""What it is."""\n\n\ndef f():\n    """What it does."""\n'
    assert begins_with_what(source) == [1, 5] and begins_with_what('"""Whatever."""\n') == []
    assert avoided_words("Learnt anew, there is no loop") == [("Learnt", "learned"), ("anew", "again")]
    assert avoided_words("recommended, twined, --read-out-only, `beside`") == []
    words = "word " * 16
    for text in (f"# {words}\n# {words}\n", f'"""{words}\n{words}."""\n', f'"""Sec. {words}et al. {words}."""\n'):
        assert len(long_sentences(text)) == 1
    for text in (
        f"# {words}.\n# {words}\n",
        f'"""{words}.\n\n- {words}\n- {words}"""\n',
        f'"""a: {words}; b: {words}"""',
    ):
        assert long_sentences(text) == []
    assert list(messages('x = f"a b {y}"; z = "ab"\n')) == [(1, "a b ")]
    assert kernel_comments("// a\n//   b\nx;  // c\n// d\n") == [(1, "a\n  b"), (3, "c"), (4, "d")]
    assert len(long_sentences(f"  // {words}\n  // {words}\n", kernel_comments)) == 1
    assert long_sentences(f"x;  // {words}\n// {words}\n", kernel_comments) == []
