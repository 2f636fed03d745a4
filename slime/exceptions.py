"""The errors a user can cause, one class per kind; each survives pickling through Ray."""


class SlimeError(Exception):
    """Base of every error that slime raises on purpose. The message says what, with which values,
    and what to do.
    """


class ConfigError(SlimeError, ValueError):
    """An option, a file or a combination of options cannot work. Raised before any process is
    started where possible.
    """


class RolloutDataError(SlimeError, ValueError):
    """Samples, columns or shards break the data contract: a length, an alignment, a missing or an
    undeclared field.
    """


class EngineError(SlimeError, RuntimeError):
    """An inference engine is unreachable, refused a request, or answered with something that is not
    a result.
    """


class NoEngineLeft(SlimeError):
    """No inference engine is left that could generate, and none comes back: the run ends."""


class ProcessDied(SlimeError):
    """A process of the run ended before it had answered. whose: its role, where it is known."""

    whose: str | None = None


class SaveError(SlimeError, OSError):
    """A checkpoint could not be written: a full or failing disk. The earlier ones are as they were;
    the state in memory is whole.
    """


class NothingLeft(SlimeError):
    """The run has no rollout to run: the message states why, and how to continue. Not a failure."""
