"""Long prompts without common prefixes: the log of an invented station, and a question about it."""

import random
from pathlib import Path

PLACES = (
    "north gate",
    "boiler room",
    "upper deck",
    "greenhouse",
    "radio mast",
    "workshop",
    "pump house",
    "archive",
)
PEOPLE = ("Ada", "Bela", "Chidi", "Dana", "Emil", "Farah", "Goro", "Hana")
DEEDS = (
    "found the door open at",
    "replaced the filter in",
    "took readings at",
    "heard a rattle near",
    "cleaned",
    "locked",
)


def text(seed: int, num_entries: int) -> str:
    """Different seeds differ from the first line on."""
    chance = random.Random(seed)
    lines = [f"Log of station {chance.randrange(10**6)}, kept by {chance.choice(PEOPLE)}."]
    for number in range(num_entries):
        hour, minute = divmod(number * 7 % 1440, 60)
        lines.append(
            f"{hour:02}:{minute:02} {chance.choice(PEOPLE)} {chance.choice(DEEDS)} the "
            f"{chance.choice(PLACES)}."
        )
    return "\n".join([*lines, "", "Question: who wrote this log, and where? Answer:"])


def token_ids(model: Path, seed: int, num_tokens: int) -> list[int]:
    """Exactly `num_tokens`, cut from the middle: the question stays."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens: list[int] = []
    num_entries = num_tokens // 12
    while len(tokens) < num_tokens:
        tokens = tokenizer.encode(text(seed, num_entries)).ids
        num_entries *= 2
    head = num_tokens * 3 // 4
    return tokens[:head] + tokens[len(tokens) - (num_tokens - head) :]
