"""What can be wrong with checkpoints. Every sentence names the step, the path and the cause."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class MismatchError(CheckpointError):
    """A checkpoint is whole but holds another program's state; each difference is listed."""


class StuckError(CheckpointError):
    """A save neither ends nor fails. Its thread cannot be stopped: the process must end without joining it."""
