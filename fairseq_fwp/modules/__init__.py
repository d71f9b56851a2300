"""Layers built from plain arguments: feature maps, update rules, normalisations, attention, decoder layer, softmax."""
