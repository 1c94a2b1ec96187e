"""Parts of ours in TorchRL's own trainers: see :func:`torchrl_perf.trainers.use_device_parts`."""

__all__: list[str] = []
