"""Load format "random": large weights, the same at each start. With vLLM's "dummy", wrong KV
would change no answer."""

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "random"


@register_model_loader(LOAD_FORMAT)
class RandomModelLoader(BaseModelLoader):
    """Matrices keep their input's magnitude."""

    def download_model(self, model_config: object) -> None:
        """No files are needed."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                values *= 0.05 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
            elif "norm" in name:
                values = 1.0 + 0.1 * values
            weight.data.copy_(values)
