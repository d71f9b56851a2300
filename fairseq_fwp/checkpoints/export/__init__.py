"""Trained models as graphs for programs without PyTorch: see cli/export.py."""
