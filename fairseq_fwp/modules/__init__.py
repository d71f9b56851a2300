"""Building blocks of models: PyTorch modules made from plain arguments, without fairseq's configurations."""
