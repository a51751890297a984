"""Every error that hf_ga raises on purpose. Scripts print them as one line and exit with code 2."""


class HfGaError(Exception):
    """Base of the errors below. The message gives the rule, the values and the remedy."""


class ConfigError(HfGaError, ValueError):
    """A flag, a configuration file or an argument that cannot be used."""


class DataError(HfGaError, ValueError):
    """A dataset that cannot be used."""


class LossNotAdditive(HfGaError, RuntimeError):
    """No counting rule (or more than one) makes the loss of a batch the weighted sum of its
    parts.

    Attributes:
        cause: The most likely cause, as a clause. None: unknown.
    """

    cause: str | None = None


class NoLoss(LossNotAdditive):
    """The model returns no loss of its own."""


class UnkeyedRandomness(HfGaError, RuntimeError):
    """A training forward draws random numbers that are not a function of the sample."""


class CheckpointError(HfGaError, RuntimeError):
    """A checkpoint that is missing, damaged or belongs to another run."""


class ProcessFailed(HfGaError, RuntimeError):
    """Another process failed in this window; the message comes from that process."""


class MissingPackage(HfGaError, ImportError):
    """A package that is not installed; the message has the command that installs it."""


class OutOfMemory(HfGaError, RuntimeError):
    """A single sample (under FSDP1, a micro-batch) does not fit in device memory."""


class NonFinite(HfGaError, ArithmeticError):
    """A loss or a gradient is not a finite number."""


class SavedModelDiffers(HfGaError, RuntimeError):
    """A saved folder does not load as the trained model; the checkpoint is kept."""


class UploadFailed(HfGaError, RuntimeError):
    """The trained model could not be uploaded; it is saved in the run's folder."""


class RunStopped(HfGaError):
    """A signal stopped the run after it saved a checkpoint to resume from. Scripts exit with code
    75.
    """
