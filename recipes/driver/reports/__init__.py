"""Tables and pictures of finished runs: CSV of the raw numbers first, then Markdown and pictures of that."""
