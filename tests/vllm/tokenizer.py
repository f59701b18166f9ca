"""A tokenizer of bytes and pairs of letters."""

import json
from pathlib import Path
from string import ascii_letters

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.vllm.tiny import VOCAB

SPECIAL = ("<pad>", "<s>", "</s>")
MESSAGE = "{{ message['role'] }}: {{ message['content'] }}\n"
CHAT_TEMPLATE = f"{{% for message in messages %}}{MESSAGE}{{% endfor %}}assistant: "


def write_tokenizer(folder: Path, extra_special: tuple[str, ...] = ()) -> Path:
    """extra_special: at the vocabulary's end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = (a + b for a in ascii_letters for b in ascii_letters)
    tokens = [*SPECIAL, *letters]
    tokens += [next(pairs) for _ in range(VOCAB - len(tokens) - len(extra_special))]
    tokens += extra_special
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (*SPECIAL, *extra_special)
    tokenizer.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
