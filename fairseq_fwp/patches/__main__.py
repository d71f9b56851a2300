"""Print the table of patches in Markdown."""

from fairseq_fwp.patches import PATCHES


def table() -> str:
    """Return a row for each patch."""
    rows = (f"| `{entry.symbol}` | {entry.reason} | {entry.since} |" for entry in PATCHES)
    return "\n".join(("| symbol | what the patch does, and why | needed since |", "| --- | --- | --- |", *rows))


if __name__ == "__main__":
    print(table())
