"""The error for a library of kernels that is not available."""


class BuildError(Exception):
    """A library cannot be built or loaded: the reason in one clause, and a remedy in another."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.cure = cure
