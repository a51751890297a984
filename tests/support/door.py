"""The Accelerator under test."""

import importlib.util
import sys

if importlib.util.find_spec("hf_ga.accelerator"):
    from hf_ga.accelerator import Accelerator
else:
    sys.path.append("/work/shared/prototypes")
    import accelerator_door

    _WindowLoader = accelerator_door.WindowLoader

    def _window_loader(*args, accelerator, **kwargs):
        size = accelerator.global_batch_size
        return _WindowLoader(*args, accelerator=accelerator, global_batch_size=size, **kwargs)

    accelerator_door.WindowLoader = _window_loader

    class Accelerator(accelerator_door.Accelerator):
        """The prototype, with a global batch."""

        def __init__(self, *args, global_batch_size=None, **kwargs):
            self.global_batch_size = global_batch_size
            super().__init__(*args, **kwargs)


__all__ = ["Accelerator"]
