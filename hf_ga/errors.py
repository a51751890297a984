"""Every error that hf_ga raises on purpose. Scripts print them as one line and exit with code 2."""


class HfGaError(Exception):
    """Base class of all errors that hf_ga raises on purpose. The message says what is wrong (with
    the values), why it matters, and what to do.
    """


class ConfigError(HfGaError, ValueError):
    """Raised when a flag, a configuration file, an argument or a setting is invalid or not
    supported.
    """


class DataError(HfGaError, ValueError):
    """Raised when a dataset, a sample or a collated batch cannot be used."""


class LossNotAdditive(HfGaError, RuntimeError):
    """Raised when the loss of a batch is not the weighted mean of the losses of its parts, so that
    it cannot be computed in micro-batches: no way of counting targets fits, or several do.

    Attributes:
        cause: The most likely cause, as a clause for the message. None: unknown.
    """

    cause: str | None = None


class NoLoss(LossNotAdditive):
    """Raised when a model returns no loss and the user passed no loss function."""


class UnkeyedRandomness(HfGaError, RuntimeError):
    """Raised when a training forward draws random numbers that are not derived from the sample's
    position, so that another split of the window would draw different ones.
    """


class CheckpointError(HfGaError, RuntimeError):
    """Raised when a checkpoint is missing, damaged, belongs to another run, or cannot be
    written.
    """


class ProcessFailed(HfGaError, RuntimeError):
    """Raised when another process failed in the same window; the message comes from that
    process.
    """


class MissingPackage(HfGaError, ImportError):
    """Raised when a required package is not installed; the message has the command that installs
    it.
    """


class OutOfMemory(HfGaError, RuntimeError):
    """Raised when a single sample (under FSDP1, a micro-batch) does not fit in device memory."""


class NonFinite(HfGaError, ArithmeticError):
    """Raised when a loss or a gradient is NaN or infinite."""


class SavedModelDiffers(HfGaError, RuntimeError):
    """Raised when a saved folder does not load as the trained model; the checkpoint is kept."""


class UploadFailed(HfGaError, RuntimeError):
    """Raised when the trained model could not be uploaded to the Hub; it is saved in the run's
    output folder.
    """


class RunStopped(HfGaError):
    """Raised after a signal stopped the run and it saved a checkpoint to resume from. Scripts exit
    with code 75.
    """
