"""Why a library of kernels is not there."""


class BuildError(Exception):
    """Why a library cannot be built or loaded, in one clause, and in another what helps."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.cure = cure
