"""The Accelerator under test."""

import importlib.util
import sys

if importlib.util.find_spec("hf_ga.accelerator"):
    from hf_ga.accelerator import Accelerator
else:
    sys.path.append("/work/shared/prototypes")
    import accelerator_door
    import torch

    from hf_ga.parallel.fsdp import is_sharded
    from hf_ga.parallel.prepare import (
        _one_name_each,
        configure_fsdp,
        enable_fp16_on_cpu,
        enable_fsdp_on_cpu,
    )

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
            enable_fsdp_on_cpu(self)
            enable_fp16_on_cpu(self)

        def prepare(self, *objects, **kwargs):
            for model in objects:
                if isinstance(model, torch.nn.Module) and is_sharded(self):
                    configure_fsdp(self.state.fsdp_plugin, model)
                    with _one_name_each(model):
                        return super().prepare(*objects, **kwargs)
            return super().prepare(*objects, **kwargs)


__all__ = ["Accelerator"]
