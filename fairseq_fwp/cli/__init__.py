"""Console commands that fairseq lacks."""
