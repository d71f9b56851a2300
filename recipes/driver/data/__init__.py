"""The data of recipes: texts that are made, downloaded or given, and their form for fairseq."""
