"""The Accelerator under test."""

import sys
from pathlib import Path

import hf_ga

if (Path(hf_ga.__path__[0]) / "accelerator").exists():
    from hf_ga import Accelerator
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
    from hf_ga.training import prove_targets

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
            models = [o for o in objects if isinstance(o, torch.nn.Module)]
            if not models or not is_sharded(self):
                return super().prepare(*objects, **kwargs)
            (loader,) = (o for o in objects if isinstance(o, torch.utils.data.DataLoader))
            samples = [loader.dataset[i] for i in range(16)]
            configure_fsdp(self.state.fsdp_plugin, models[0])
            self._early = prove_targets(models[0], samples, loader.collate_fn, speed_ups=())
            with _one_name_each(models[0]):
                return super().prepare(*objects, **kwargs)

        def _micro_batches(self, window, model, batch_type):
            if is_sharded(self):
                window.state.proofs[getattr(model, "module", model)] = self._early
            return super()._micro_batches(window, model, batch_type)


__all__ = ["Accelerator"]
