"""Plain English in the package, its kernels, the recipes and the pages: short sentences, and the field's words."""

import ast
import io
import re
import tokenize
from pathlib import Path

from support.pairwise import looped

ROOT = Path(__file__).parent.parent
CODE = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("fairseq_fwp", "recipes")}
KERNELS = [path for suffix in ("h", "cpp", "cuh", "cu") for path in sorted((ROOT / "cuda_ext").rglob(f"*.{suffix}"))]
GUIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "cuda_ext").glob("*.md"), *(ROOT / "docs").glob("*.md")]
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


def docstrings(source):
    nodes = ast.walk(ast.parse(source))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [text for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node))]


def comments(source):
    """Return every comment; those in successive lines are one."""
    found, before = [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), text = token.start, token.string.lstrip("# ")
            found.append(f"{found.pop()}\n{text}" if before == (line - 1, column) else text)
            before = line, column
    return found


def kernel_comments(source):
    """Return every // comment; those in successive lines without code are one."""
    found, joined = [], False
    for code in source.splitlines():
        before, slashes, text = code.partition("//")
        whole = bool(slashes) and not before.strip()
        if slashes and not text.startswith(" " * 5):  # indented: equations and loops
            found.append(f"{found.pop()}\n{text[1:]}" if whole and joined else text[1:])
        joined = whole
    return found


def messages(source):
    """Return every string with a space, docstrings included."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str) and " " in value]


def without_code(text):
    return re.sub(r"```.*?```|``.*?``|`[^`]*`", "CODE", text, flags=re.DOTALL)


def prose(page):
    """Return a page with each cell of a table and each item of a list as a paragraph, without code and addresses."""
    page = re.sub(r"^```.*?^```|^    .*$", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"^\|(.*)\|$", lambda row: row[1].replace("|", "\n\n") + "\n", page, flags=re.MULTILINE)
    return re.sub(r"^ *(?:[-*]|\d+\.|#+) ", "\n\n", page, flags=re.MULTILINE)


def long_sentences(text):
    sentences = END.split(without_code(text))
    return [" ".join(s.split()) for s in sentences if len(re.findall(r"\S*[A-Za-z]\S*", s)) > LONGEST_SENTENCE]


def avoided_words(text):
    text = without_code(text)
    return [f"{found[0]}: write {instead}" for word, instead in AVOIDED.items() for found in word.finditer(text)]


def check(paths, *texts, faults=(long_sentences, avoided_words)):
    assert paths
    found = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in paths
        for of in texts
        for text in of(path.read_text(encoding="utf-8"))
        for find in faults
        for fault in find(text)
    ]
    assert found == []


@looped("folder", CODE)
def test_docstrings_comments_and_messages_have_short_sentences_and_no_avoided_words(folder):
    check(CODE[folder], docstrings, comments)
    check(CODE[folder], messages, faults=(avoided_words,))


def test_comments_of_kernels_have_short_sentences_and_no_avoided_words():
    check(KERNELS, kernel_comments)


def test_pages_have_short_sentences_and_no_avoided_words():
    check(GUIDE, lambda page: [prose(page)], faults=(long_sentences,))
    check([*ROOT.glob("*.md"), *ROOT.glob("recipes/*/*.md"), *GUIDE[2:]], lambda page: [page], faults=(avoided_words,))


def test_each_kind_of_fault_is_found():
    """The checks find what they are for, and only whole words."""
    assert avoided_words("Learnt anew, there is no loop") == ["Learnt: write learned", "anew: write again"]
    assert avoided_words("recommended, twined, --read-out-only, `beside`") == []
    words = "word " * 16
    for texts in (comments(f"# {words}\n# {words}\n"), docstrings(f'"""Sec. {words}et al. {words}."""\n')):
        assert [len(long_sentences(text)) for text in texts] == [1]
    for text in (f"{words}.\n{words}", f"{words}.\n\n- {words}\n- {words}", f"a: {words}; b: {words}"):
        assert long_sentences(text) == []
    assert messages('x = f"a b {y}"; z = "ab"\n') == ["a b "]
    assert kernel_comments("// a\n//   b\nx;  // c\n// d\n") == ["a\n  b", "c", "d"]
    assert long_sentences(prose(f"| {words}| {words}|\n- {words}\n")) == []
