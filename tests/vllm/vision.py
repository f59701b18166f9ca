"""Idefics3, a model for pictures that vLLM runs without torchvision."""

import json
from pathlib import Path

from tests.vllm.tiny import COMMON, MODELS, VOCAB
from tests.vllm.tokenizer import write_tokenizer

IMAGE_TOKEN = VOCAB - 1
SIZE = 56


def write_vision_model(folder: Path) -> Path:
    """IMAGE_TOKEN stands for a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(
        folder, ("<end_of_utterance>", "<fake_token_around_image>", "<global-img>", "<image>")
    )
    vision = {"model_type": "idefics3_vision", "image_size": SIZE, "patch_size": SIZE // 8}
    vision |= {"hidden_size": 64, "intermediate_size": 128}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": IMAGE_TOKEN,
        "scale_factor": 2,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "text_config": COMMON | MODELS["llama"],
        "vision_config": vision,
    }
    steps = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_pad")
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "size": {"longest_edge": SIZE},
        "max_image_size": {"longest_edge": SIZE},
        "do_image_splitting": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "rescale_factor": 1 / 255,
        "resample": 3,
        **dict.fromkeys(steps, True),
    }
    whole = {"processor_class": "Idefics3Processor", "image_seq_len": 16}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps(whole))
    return folder
