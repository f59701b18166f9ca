"""`hotkv_sparse.cuda.device.Device` with torch's memory and streams, for kernels of an engine's
step.

Always true: launches and copies go to torch's current stream, so CUDA graphs include them.
`write` copies to pinned memory, which torch retains until the device has copied it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hotkv_sparse.cuda.device import Argument, Array, CupyDevice, Host


class TorchDevice(CupyDevice):
    """Arrays are torch tensors. `device` must have an index, such as `cuda:0`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        super().__init__(device.index, torch.cuda.current_stream(device).cuda_stream)

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.zeros(tuple(shape), dtype=kind, device=self.device)

    def write(self, target: Array, start: Sequence[int], values: Host) -> None:
        """Does not wait; the caller may change `values` after the call."""
        assert isinstance(target, torch.Tensor)
        place = tuple(slice(at, at + size) for at, size in zip(start, values.shape, strict=True))
        pinned = torch.from_numpy(np.array(values)).pin_memory()
        target[place].copy_(pinned, non_blocking=True)

    def read(self, source: Array) -> Host:
        """Waits for the device."""
        assert isinstance(source, torch.Tensor)
        found: Host = source.cpu().numpy()
        return found

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        threads: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Does not wait."""
        self.use_stream(torch.cuda.current_stream(self.device).cuda_stream)
        super().launch(kernel, grid, threads, args, shared_bytes)
