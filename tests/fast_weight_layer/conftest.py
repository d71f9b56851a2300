"""The small models of tests/models."""

from models.conftest import build_model  # noqa: F401  (a fixture)
