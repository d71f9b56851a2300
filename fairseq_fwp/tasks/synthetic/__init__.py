"""Generated problems: retrieval of associations (Schlag et al. 2021, Sec. 6.1), state tracking and recall.

Importing this registers the tasks, the model with its architectures, and the criterions with fairseq.
"""

from fairseq_fwp.tasks.synthetic import model, tasks

__all__ = ["model", "tasks"]
