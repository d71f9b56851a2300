"""Print the table of patches in Markdown."""

from fairseq_fwp.outputs import one_sentence
from fairseq_fwp.patches import PATCHES


def table() -> str:
    """Return a row for each patch."""
    rows = (f"| `{entry.symbol}` | {entry.reason} | {entry.since.removesuffix('fairseq 0.12')} |" for entry in PATCHES)
    return "\n".join(
        ("| symbol | what the patch does, and why | since (if not fairseq 0.12) |", "| --- | --- | --- |", *rows)
    )


if __name__ == "__main__":
    with one_sentence("fairseq_fwp.patches"):
        print(table())
