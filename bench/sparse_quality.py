"""Measures how closely sparse decode follows dense attention, on real text with a real model: the
tables of docs/sparse.md.

Of 8192 tokens the first 7936 are prefilled densely, the rest decoded teacher-forced, sparsely in
every layer but two (in every one with `--resident` and `--field`), so errors accumulate. Quality is
KL(dense || sparse) and the rise of NLL per token, in nats; and strong-block recall: how often a KV
head attends to its heaviest candidate if that has more than 0.1 of the attention. A scorer's
suffix, such as `+mu`, is its calibration's source (`bench.sparse.llama`). Texts are the system's
(`bench.sparse.texts`) or `--texts`.

Prints a row per text and variant (`bench.sparse.variants`) and, with `--json`, `{"model",
"texts", "seconds", "rows", "targets"}`. `--resident`: residency's variants and targets.
`--field`: budgets of 128, 512 and 2048 tokens, as in publications, beside exact mass, and rivals
with as many bytes: Quest, means, and low-rank summaries (`bench.sparse.low_rank`); without targets.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.report import (
    Bound,
    at_least,
    at_most,
    bounds_json,
    parser,
    print_report,
    rows_table,
    say,
)
from bench.sparse.decode import Decode, Outcome
from bench.sparse.llama import Calibration, Dense, Llama, Own, calibration, dense_pass
from bench.sparse.texts import REPEAT, Text, add_model, add_texts, encoder, texts
from bench.sparse.variants import (
    DEFAULT,
    LRU,
    RESIDENT,
    RESIDENT_SCORERS,
    SERVED,
    TIGHT,
    Variant,
    bytes_per_token,
    default_variants,
    field_variants,
    passes,
    resident_variants,
)
from hotkv_proto.errors import HotKVError
from hotkv_sparse.centre import Centres
from hotkv_sparse.centre_file import read_centres
from tools.smollm2 import prepare

CONTEXT_TOKENS = 8192
COMPARED_TOKENS = 256
DENSE_LAYERS = 2
TEXT_KL = {"prose": 0.010, "gpl3": 0.020}
PASS_VARIANTS = 28
"""That decode together, and share reading the weights and the prompt's KV."""
HELD_SCORERS = ("rot2u", "rot2u+mu", "mix2+mu", "mix2+first")


@dataclass(frozen=True, slots=True)
class Row:
    text: Text
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Target:
    """On a scorer's worst figure: over prose, over the copy text, or both."""

    name: str
    value: float | None
    bound: Bound

    @property
    def met(self) -> bool:
        return self.value is not None and self.bound.is_met(self.value)


def targets(rows: Sequence[Row], scorer: str) -> list[Target]:
    tight, served = Variant(scorer, *TIGHT), Variant(scorer, *SERVED, LRU, 2)

    def worst_kl(variant: Variant) -> float | None:
        return max(
            (
                row.outcome.kl
                for row in rows
                if row.outcome.variant == variant and not row.text.copy
            ),
            default=None,
        )

    def copy_loss(variant: Variant) -> float | None:
        return max(
            (
                row.outcome.delta_nll
                for row in rows
                if row.outcome.variant == variant and row.text.copy
            ),
            default=None,
        )

    recalls = [
        row.outcome.recall
        for row in rows
        if row.outcome.variant == tight and row.outcome.recall is not None
    ]
    return [
        Target(f"{tight.key}: prose kl", worst_kl(tight), at_most(0.05)),
        Target(f"{tight.key}: copy delta_nll", copy_loss(tight), at_most(0.05)),
        Target(f"{tight.key}: recall", min(recalls, default=None), at_least(0.98)),
        Target(f"{served.key}: prose kl", worst_kl(served), at_most(0.015)),
        Target(f"{served.key}: copy delta_nll", copy_loss(served), at_most(0.08)),
    ]


def text_targets(rows: Sequence[Row], key: Variant) -> list[Target]:
    """A bound for each text."""
    of_text = {row.text.name: row.outcome for row in rows if row.outcome.variant == key}
    found = [
        Target(f"{key.key}: {name} kl", of_text[name].kl, at_most(bound))
        for name, bound in TEXT_KL.items()
        if name in of_text
    ]
    if REPEAT in of_text:
        found.append(Target(f"{key.key}: copy delta_nll", of_text[REPEAT].delta_nll, at_most(0.0)))
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """With its dense pass and calibrations."""

    text: Text
    dense: Dense
    own: Own


def seen(model: Llama, text: Text, first_layer: int, num_compared: int) -> Seen:
    begin = time.monotonic()
    dense = dense_pass(model, torch.tensor(text.tokens[:-1]), num_compared, first_layer)
    own = Own.of(dense)
    say(f"{text.name} ({text.source}): dense pass {time.monotonic() - begin:.0f} s")
    return Seen(text, dense, own)


def measure(
    model: Llama, seen: Seen, calibrated: Calibration, variants: Sequence[Variant]
) -> list[Row]:
    begin, text = time.monotonic(), seen.text
    outcomes: list[Outcome] = []
    num_threads = torch.get_num_threads()
    # Small arrays: one thread is quicker.
    torch.set_num_threads(1)
    for some in passes(variants, PASS_VARIANTS):
        outcomes += Decode(model, seen.dense, torch.tensor(text.tokens), calibrated, some).run()
        took_s = time.monotonic() - begin
        say(f"{text.name}: {len(outcomes)} of {len(variants)} variants, {took_s:.0f} s")
    torch.set_num_threads(num_threads)
    by_variant = {outcome.variant: outcome for outcome in outcomes}
    rows = [Row(text, by_variant[variant]) for variant in variants]
    # A run takes long.
    say(f"\n{rows_table([figures(row, model.shape.head_size) for row in rows])}")
    return rows


def all_rows(
    model: Llama,
    found: Sequence[Text],
    wanted: Sequence[str],
    file: Centres | None,
    variants: Sequence[Variant],
    first_layer: int,
    num_compared: int,
) -> list[Row]:
    """Calibrated from the first text; the first from the second, or from its copy text.

    wanted: texts' names; empty: all.
    file: for `+file`.
    first_layer: the first sparse one.
    num_compared: tokens.
    """
    first, second = found[:2]
    rows: list[Row] = []
    calibrating: Own | None = None
    for text in found:
        if wanted and text.name not in wanted:
            continue
        now = seen(model, text, first_layer, num_compared)
        if calibrating is None:
            other = second if text is first else first
            calibrating = seen(model, other, first_layer, num_compared).own
        rows += measure(model, now, calibration(calibrating, now.own, file, first_layer), variants)
        if text is first:
            calibrating = now.own
    return rows


def figures(row: Row, head_size: int) -> dict[str, object]:
    """`bytes_per_token`: per KV head."""
    outcome, variant = row.outcome, row.outcome.variant
    return {
        "text": row.text.name,
        "variant": variant.key,
        "scorer": variant.scorer,
        "bytes_per_token": bytes_per_token(variant, head_size),
        "budget": variant.budget,
        "block_tokens": variant.block_tokens,
        "shared": variant.shared,
        "selection": variant.freshness,
        "max_correction_blocks": variant.corrections,
        "kl": outcome.kl,
        "delta_nll": outcome.delta_nll,
        "strong_block_recall": outcome.recall,
        "attended_ratio": outcome.attended_ratio,
        "moved_blocks": outcome.moved_blocks,
    }


def options() -> argparse.Namespace:
    flags = parser("Selection quality of sparse decode against dense attention.")
    add_model(flags)
    add_texts(flags)
    only = flags.add_mutually_exclusive_group()
    only.add_argument(
        "--resident",
        action="store_true",
        help="what residency does: no dense layers, absolute budgets",
    )
    only.add_argument(
        "--field",
        action="store_true",
        help="as publications measure: no dense layers, budgets of 128, 512 and 2048 tokens, a "
        "fresh selection of 16-token blocks for each KV head",
    )
    flags.add_argument(
        "--compared",
        type=int,
        default=COMPARED_TOKENS,
        help="tokens at the end of each text that are decoded and compared",
    )
    flags.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="measure on these, by name"
    )
    flags.add_argument(
        "--threads", type=int, help="threads of the dense passes (default: one per core)"
    )
    return flags.parse_args()


def main() -> int:
    chosen = options()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    folder = chosen.model or prepare()
    encode = encoder(AutoTokenizer.from_pretrained(folder))

    try:
        model = Llama(folder)
        if model.shape.max_tokens < CONTEXT_TOKENS:
            raise ValueError(
                f"{folder} takes {model.shape.max_tokens} tokens; use a model of "
                f"{CONTEXT_TOKENS} or more"
            )
        found = texts(chosen.texts, encode, CONTEXT_TOKENS + 1, chosen.compared + 1)
        if unknown := set(chosen.only) - {text.name for text in found}:
            names = ", ".join(text.name for text in found)
            raise ValueError(f"--only: {', '.join(unknown)} is no text; there are {names}")
        file = read_centres(chosen.centres) if chosen.centres else None
    except (OSError, ValueError, HotKVError) as error:
        print(error, file=sys.stderr)
        return 2
    begin = time.monotonic()
    variants_of = default_variants
    if chosen.resident or chosen.field:
        variants_of = resident_variants if chosen.resident else field_variants
    variants = variants_of(with_file=file is not None)
    try:
        with torch.inference_mode():
            first_layer = 0 if chosen.resident or chosen.field else DENSE_LAYERS
            rows = all_rows(model, found, chosen.only, file, variants, first_layer, chosen.compared)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    held: list[Target] = []
    if chosen.resident:
        kept = [Variant(scorer, 0.20, *RESIDENT) for scorer in RESIDENT_SCORERS]
        held = [target for variant in kept for target in text_targets(rows, variant)]
    elif not chosen.field:
        held = [target for scorer in HELD_SCORERS for target in targets(rows, scorer)]
        held += text_targets(rows, DEFAULT)
    report: dict[str, Any] = {
        "model": folder.name,
        "texts": {text.name: text.source for text in found},
        "seconds": time.monotonic() - begin,
        "rows": [figures(row, model.shape.head_size) for row in rows],
        "targets": {target.name: target.value for target in held},
        **bounds_json({target.name: target.bound for target in held}),
    }
    print(rows_table(report["rows"]))
    bounds = [
        (
            target.name,
            f"{target.value:.4f}" if target.value is not None else "",
            str(target.bound),
            "" if target.met else "missed",
        )
        for target in held
    ]
    print()
    print_report(("target", "worst text", "bound", ""), bounds, report, as_json=chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
