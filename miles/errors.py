"""The exception tree. A `MilesError` is a user's mistake or an outside failure: one clear sentence, no traceback.

Whoever raises one names the flag, file and row, says what was expected and what to do. Mistakes of this code are
asserts and keep their traceback.
"""

from collections.abc import Sequence


class MilesError(Exception):
    """Base of every error that is shown to a user as one sentence. `exit_code` is what the command ends with;
    `repairable` says that the same step may well succeed in a new worker."""

    exit_code = 1
    repairable = False


class ConfigError(MilesError):
    """A flag, a YAML file or a combination of flags is wrong. Carries every violation found, not only the first."""

    exit_code = 2

    def __init__(self, *violations: str) -> None:
        assert violations, "a ConfigError needs at least one violation"
        self.violations = violations
        super().__init__("\n".join(violations))


class PluginError(ConfigError):
    """An import path given by a flag cannot be imported, has the wrong signature or fails its probe."""


class DataError(MilesError):
    """A row of a data file is empty, malformed or has a label that cannot be read; names the file and the row."""

    exit_code = 2


class CheckpointError(MilesError):
    """A checkpoint or model folder is missing, incomplete, damaged or of an unsupported architecture."""

    exit_code = 2


class RewardError(MilesError):
    """A reward raised, timed out or returned something that is not a finite number."""


class RequestError(MilesError):
    """A program asked the endpoint of a session for something that it does not give; `status` is that of HTTP."""

    def __init__(self, text: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.status, self.code = status, code


class EngineError(MilesError):
    """The rollout engine cannot serve a request or has failed."""

    repairable = True


class TrainError(MilesError):
    """The trainer cannot go on: nothing to train on, or numbers that are not finite."""


class NotFiniteError(TrainError):
    """A loss, a gradient or a log-prob is nan or inf; `samples` are the indices of the samples it comes from."""

    def __init__(self, message: str, samples: Sequence[int]) -> None:
        super().__init__(message)
        self.samples = frozenset(samples)


class StorageError(MilesError):
    """Writing to the run folder failed: disk full, read-only or taken by another run."""


class WorkerError(MilesError):
    """The worker process died or stopped answering."""
