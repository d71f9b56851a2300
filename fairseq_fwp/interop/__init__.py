"""Our operators under other libraries' names: fla's and causal-conv1d's functions, and models of transformers.

Nothing here imports fairseq, fla or transformers, unless a function of theirs is asked for.
"""
