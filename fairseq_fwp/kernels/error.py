"""The error for a library of kernels that is not available."""


class BuildError(Exception):
    """The reason why a library cannot be built or loaded, in one clause, and in another what to do."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.cure = cure
