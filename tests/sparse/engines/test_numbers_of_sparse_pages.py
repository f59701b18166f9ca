"""Pages promise the times and numbers that sparse decode has."""

import pytest

from hotkv_sparse.vllm.block_manager import SPARE_SLOTS
from hotkv_sparse.vllm.cpu.first_prompt import ENOUGH_TOKENS
from hotkv_sparse.vllm.scheduler.resident_requests import PARK_S, QUANTUM_TOKENS
from tests.vllm.test_numbers_of_pages import DOCS


@pytest.mark.parametrize(
    ("page", "words", "number", "value"),
    [
        ("residency", "hot = sparse_topk / b + 8", 8, SPARE_SLOTS),
        ("residency", "present tokens and 512 more", 512, QUANTUM_TOKENS),
        ("residency", "If all pause for a second", 1, PARK_S),
        ("sparse", "densely until it has seen 2048 tokens", 2048, ENOUGH_TOKENS),
    ],
)
def test_a_page_says_the_number(page: str, words: str, number: float, value: float) -> None:
    assert words in " ".join((DOCS / f"{page}.md").read_text().split())
    assert value == number
