"""Registers a load format "random" with vLLM: random weights, the same at each start, so large that
every token of the context influences the log probabilities. With vLLM's own format "dummy", wrong
KV would not change the answer, so tests would not notice it."""

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "random"


@register_model_loader(LOAD_FORMAT)
class RandomModelLoader(BaseModelLoader):
    """A model loader that fills weights with seeded random numbers, the same in every engine.
    Matrices preserve the magnitude of their input, and norm weights stay near 1."""

    def download_model(self, model_config: object) -> None:
        """Does nothing: random weights need no files."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                values *= 0.05 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
            elif "norm" in name:
                values = 1.0 + 0.1 * values
            weight.data.copy_(values)
