"""Tables and pictures of finished runs: first a CSV of the raw numbers, then Markdown and pictures from it."""
