"""Trained models as files: read, converted from and to other code's, linearised, exported."""
