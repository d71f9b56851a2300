"""Print the table of patches."""

from fairseq_fwp.patches import table

print(table(), end="")
