from operator_fixtures import one_thread, poisoned_memory  # noqa: F401
