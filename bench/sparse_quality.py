"""Measures how closely sparse decode follows dense attention, on real text with a real model. Makes
the tables of selection quality in docs/sparse.md.

The first 7936 tokens of a text of 8192 are prefilled densely. The rest is decoded teacher-forced
with sparse attention in every layer except the first two (in every layer with `--resident` and
`--field`), so that errors accumulate. Quality is measured by KL(dense || sparse) and by the rise of
NLL over the dense run of the same tokens, per token in nats. Strong-block recall is measured too:
how often a KV head attends to its heaviest candidate block when that block has more than 0.1 of the
attention. `hotkv_sparse` makes every selection. A suffix of a scorer's name, such as `+mu`, says
from which text its centres (mean keys) and axes were computed (`bench.sparse.llama`). Texts are
found on the system (`bench.sparse.texts`), or named by `--texts`.

Prints a row per text and variant (way to select blocks, see `bench.sparse.variants`) and, with
`--json`, `{"model", "texts", "seconds", "rows", "targets"}`. The default run has the rows with
targets. `--resident` has the variants for residency (contexts in host memory), with separate
targets. `--field` has budgets of 128, 512 and 2048 tokens, as in publications, and compares with
selections by exact attention mass and with another method, page low-rank summaries
(`bench.sparse.low_rank`); its rows have no targets.
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
RESIDENT_KL = {"prose": 0.010, "gpl3": 0.020}
PASS_VARIANTS = 28
"""Number of variants (ways to select blocks) that decode together. They share the reading of
weights and the KV of the prompt; each has its own KV for the decoded tokens."""
HELD_SCORERS = ("rot2u", "rot2u+mu", "mix2+mu", "mix2+first")


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a variant on a text."""

    text: Text
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the worst figure of a scorer (way to score blocks): over prose texts, over the
    copy text (whose end quotes itself), or over both."""

    name: str
    value: float | None
    bound: Bound

    @property
    def met(self) -> bool:
        """Returns True if there is a figure and it is within the bound."""
        return self.value is not None and self.bound.is_met(self.value)


def targets(rows: Sequence[Row], scorer: str) -> list[Target]:
    """Returns the targets of a scorer (way to score blocks), with its measured figures."""
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


def resident_targets(rows: Sequence[Row], scorer: str) -> list[Target]:
    """Returns the targets of a scorer (way to score blocks) for residency (contexts in host memory,
    all layers sparse), at a budget of 20 % and without a file of centres. Each text has a separate
    bound."""
    key = Variant(scorer, 0.20, *RESIDENT)
    of_text = {row.text.name: row.outcome for row in rows if row.outcome.variant == key}
    found = [
        Target(f"{key.key}: {name} kl", of_text[name].kl, at_most(bound))
        for name, bound in RESIDENT_KL.items()
        if name in of_text
    ]
    if REPEAT in of_text:
        found.append(Target(f"{key.key}: copy delta_nll", of_text[REPEAT].delta_nll, at_most(0.0)))
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """A text with its dense pass (the forward pass with dense attention) and the calibrations (mean
    keys and axes) computed from it."""

    text: Text
    dense: Dense
    own: Own


def seen(model: Llama, text: Text, first_layer: int, num_compared: int) -> Seen:
    """Runs a text through the model with dense attention. Returns this pass, and the mean keys and
    axes computed from it."""
    begin = time.monotonic()
    dense = dense_pass(model, torch.tensor(text.tokens[:-1]), num_compared, first_layer)
    own = Own.of(dense)
    say(f"{text.name} ({text.source}): dense pass {time.monotonic() - begin:.0f} s")
    return Seen(text, dense, own)


def measure(
    model: Llama, seen: Seen, calibrated: Calibration, variants: Sequence[Variant]
) -> list[Row]:
    """Decodes a text in all variants (ways to select blocks). Returns a row of results for each
    variant.

    calibrated: the centres (mean keys) and axes that sketches use.
    """
    begin, text = time.monotonic(), seen.text
    outcomes: list[Outcome] = []
    num_threads = torch.get_num_threads()
    # Decode computes on small arrays, for which several threads would be slower than one.
    torch.set_num_threads(1)
    for some in passes(variants, PASS_VARIANTS):
        outcomes += Decode(model, seen.dense, torch.tensor(text.tokens), calibrated, some).run()
        took_s = time.monotonic() - begin
        say(f"{text.name}: {len(outcomes)} of {len(variants)} variants, {took_s:.0f} s")
    torch.set_num_threads(num_threads)
    by_variant = {outcome.variant: outcome for outcome in outcomes}
    rows = [Row(text, by_variant[variant]) for variant in variants]
    # Prints finished rows at once, because a run takes long.
    say(f"\n{rows_table([figures(row, model.shape.head_size) for row in rows])}")
    return rows


def all_rows(
    model: Llama,
    found: Sequence[Text],
    file: Centres | None,
    variants: Sequence[Variant],
    first_layer: int,
    num_compared: int,
) -> list[Row]:
    """Measures all variants (ways to select blocks) on all texts. The variants get the centres
    (mean keys) of the first text. For the first text itself they get the centres of the second
    text, or of the first text's copy text if there is no other.

    file: centres for the scorers with `+file`; None: there are no such scorers.
    first_layer: the first sparse layer.
    num_compared: number of tokens to decode and compare.
    """
    first, second = (seen(model, text, first_layer, num_compared) for text in found[:2])
    rows = measure(model, first, calibration(second.own, first.own, file, first_layer), variants)
    other, later = first.own, [second]
    del first
    for text in found[1:]:
        now = later.pop() if later else seen(model, text, first_layer, num_compared)
        rows += measure(model, now, calibration(other, now.own, file, first_layer), variants)
    return rows


def figures(row: Row, head_size: int) -> dict[str, object]:
    """Returns a row as JSON values. `bytes_per_token` is the size of the scorer's sketch
    for a KV head of `head_size` channels."""
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
    """Returns the options of the command line."""
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
            rows = all_rows(model, found, file, variants, first_layer, chosen.compared)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    held: list[Target] = []
    if chosen.resident:
        held = [target for scorer in RESIDENT_SCORERS for target in resident_targets(rows, scorer)]
    elif not chosen.field:
        held = [target for scorer in HELD_SCORERS for target in targets(rows, scorer)]
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
