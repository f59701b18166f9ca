"""`hotkv_sparse.estimate` against runs of vLLM on this machine: predicted over measured.

Time to the first token and time of a decode step, dense and sparse with all KV on the device (10 %,
`rot2u`, layers 0 and 1 dense), one request at a time. SmolLM2 is the real model; the others have
random weights, which take as long. The shares of `hotkv_sparse.estimate.here` come from `--fit`
over the models of `FITTED`; those of `CHECKED` and the longest context of SmolLM2 have no part in
them. Bounds: every ratio within .8 to 1.2.

`--save` keeps what was measured, `--load` compares it again. A run on a GPU, or with residency, is
compared in the same way: a file of `Case`s, with `--device` for a GPU.

Prints a row per case and, with `--json`, `{"device", "rows", "ratio_prefill_…", "ratio_step_…",
"worst_ratio"}`. `--fit` also prints the shares that fit best.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.report import median, parser, print_report
from bench.sparse.engine import Setup
from bench.sparse.steps import MIN_CONTEXT_TOKENS, Timed
from hotkv_sparse import SparseConfig
from hotkv_sparse.estimate import Device, Mode, Model, Plan, decode, prefill
from hotkv_sparse.estimate.devices import device_named
from hotkv_sparse.estimate.here import cpu_device
from hotkv_sparse.estimate.models import model_named
from tools.smollm2 import prepare

LEAST_RATIO, MOST_RATIO = 0.8, 1.2
CHUNK_TOKENS = 2048
REAL = "smollm2-135m"
SHORT = "smollm2-4-layers"
FITTED = {REAL: (64, 2048, 4096), SHORT: (64,), "llama-3.2-1b": (64, 2048)}
CHECKED = {REAL: (6144,), "qwen2.5-0.5b": (64, 2048, 3072)}
MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured: medians over rounds, in seconds; the machine's rates over all rounds.
    `prefill_s` is of both modes, whichever computed the prompt."""

    model: str
    context_tokens: int
    mode: str
    fitted: bool
    prefill_s: float
    step_s: float
    bandwidth: float
    flops: float

    @property
    def key(self) -> str:
        """For the keys of `--json`."""
        return f"{self.model}_{self.context_tokens}_{self.mode}"


def model_of(name: str) -> Model:
    """The table's model, or SmolLM2 cut to four layers, which tells costs of a step from those of
    its layers."""
    if name == SHORT:
        return replace(model_named(REAL), name=SHORT, layers=4)
    return model_named(name)


def write_config(folder: Path, model: Model, context_tokens: int) -> None:
    """A config.json of a Llama model with these sizes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context_tokens,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "attention_bias": model.qkv_bias,
    }
    (folder / "config.json").write_text(json.dumps(config))


def measured(name: str, contexts: Sequence[int], chosen: argparse.Namespace) -> list[Timed]:
    """Runs a model in a process of its own."""
    model = model_of(name)
    with tempfile.TemporaryDirectory(prefix="hotkv-estimate-") as made:
        folder = Path(made)
        if name == REAL:
            folder = prepare()
        else:
            write_config(folder, model, max(*contexts, MIN_CONTEXT_TOKENS) + 128)
        command = [sys.executable, "-m", "bench.sparse.steps", str(folder), "--contexts"]
        command += [str(context) for context in contexts]
        command += [f"--vocab={model.vocab}", f"--chunk-tokens={CHUNK_TOKENS}"]
        command += [f"--rounds={chosen.rounds}", f"--threads={chosen.threads}"]
        threads = str(chosen.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "NUMBA_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        output = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return [Timed(**item) for item in json.loads(output.splitlines()[-1])]


def cases_of(name: str, found: Sequence[Timed]) -> list[Case]:
    """Medians of a model's runs."""
    bandwidth = median([one.bandwidth for one in found])
    flops = median([one.flops for one in found])
    cases = []
    for context, mode in dict.fromkeys((one.context_tokens, one.mode) for one in found):
        same = [one for one in found if one.context_tokens == context]
        cases.append(
            Case(
                name,
                context,
                mode,
                context in FITTED.get(name, ()),
                median([one.prefill_s for one in same if one.prefill_s is not None]),
                median([one.step_s for one in same if one.mode == mode]),
                bandwidth,
                flops,
            )
        )
    return cases


def plan_of(context_tokens: int) -> Plan:
    """What `bench.sparse.steps` runs."""
    setup = Setup()
    return Plan(
        tokens=context_tokens,
        block_tokens=setup.block_tokens,
        sparse=SparseConfig(
            sparse_topk=setup.budget_ratio,
            scorer=setup.scorer,
            max_correction_blocks=setup.corrections,
            min_context_tokens=MIN_CONTEXT_TOKENS,
        ),
        chunk_tokens=CHUNK_TOKENS,
    )


def predicted(case: Case, device: Device) -> tuple[float, float]:
    """Seconds to the first token and of a step."""
    model, plan, mode = model_of(case.model), plan_of(case.context_tokens), Mode(case.mode)
    return (
        prefill(model, device, plan, mode).total.value,
        decode(model, device, plan, mode).total.value,
    )


SHARES = (
    "weight_ratio",
    "attention_ratio",
    "score_ratio",
    "compute_ratio",
    "prefill_attention_ratio",
    "step_s",
    "layer_s",
    "select_s",
)
"""What `--fit` finds."""


def shares_of(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the first token and of a step that each of `SHARES` accounts for, at a share of 1,
    or for one second of a fixed cost."""
    model, plan, mode = model_of(case.model), plan_of(case.context_tokens), Mode(case.mode)
    bare = {name: 1.0 if name.endswith("_ratio") else 0.0 for name in SHARES} | {"select_s": 1.0}
    device = cpu_device(MEMORY_BYTES, case.bandwidth, case.flops).with_(bare)
    first, step = prefill(model, device, plan, mode), decode(model, device, plan, mode)
    return (
        {
            "compute_ratio": first.linear.value,
            "prefill_attention_ratio": first.attention.value,
            "step_s": first.steps.value,
            "layer_s": first.steps.value * model.layers,
        },
        {
            "weight_ratio": step.linear.value,
            "attention_ratio": step.attention.value,
            "score_ratio": step.scoring.value,
            "step_s": 1.0,
            "layer_s": model.layers,
            "select_s": step.choosing.value,
        },
    )


def fit(cases: Sequence[Case]) -> dict[str, float]:
    """The shares of the least squared relative error over all cases; 0 for what they do not tell.

    Times are sums of work over rate, so they are linear in the inverses of shares and in the fixed
    costs. None may be negative: one that comes out so is left out, and the rest fitted again.
    """
    rows = []
    for case in cases:
        for found, took_s in zip(shares_of(case), (case.prefill_s, case.step_s), strict=True):
            rows.append([found.get(name, 0.0) / took_s for name in SHARES])
    work, used = np.array(rows), list(range(len(SHARES)))
    while True:
        solved = np.linalg.lstsq(work[:, used], np.ones(len(work)), rcond=None)[0]
        if (solved >= 0).all():
            break
        used.remove(used[int(np.argmin(solved))])
    inverse = {SHARES[place]: float(value) for place, value in zip(used, solved, strict=True)}
    return {
        name: inverse.get(name, 0.0)
        if name.endswith("_s")
        else (1 / inverse[name] if inverse.get(name) else 0.0)
        for name in SHARES
    }


def report_of(cases: Sequence[Case], known: Device | None = None) -> dict[str, object]:
    """What `--json` prints, rows apart. `known`: a device of the table that the cases ran on;
    without it this machine, as fast as it was then."""
    report: dict[str, object] = {}
    for case in cases:
        device = known or cpu_device(MEMORY_BYTES, case.bandwidth, case.flops)
        prefill_s, step_s = predicted(case, device)
        report[f"ratio_prefill_{case.key}"] = prefill_s / case.prefill_s
        report[f"ratio_step_{case.key}"] = step_s / case.step_s
    return report


def rows_of(cases: Sequence[Case], report: dict[str, object]) -> list[tuple[object, ...]]:
    """The table: predicted, measured and their ratio for both phases."""

    def cells(ratio: object, measured_s: float) -> tuple[str, str, str]:
        assert isinstance(ratio, float)
        mark = "" if LEAST_RATIO <= ratio <= MOST_RATIO else " missed"
        return f"{ratio * measured_s * 1e3:.1f}", f"{measured_s * 1e3:.1f}", f"{ratio:.2f}{mark}"

    return [
        (
            case.model,
            case.context_tokens,
            case.mode,
            "fitted" if case.fitted else "checked",
            *cells(report[f"ratio_prefill_{case.key}"], case.prefill_s),
            *cells(report[f"ratio_step_{case.key}"], case.step_s),
        )
        for case in cases
    ]


HEADERS = (
    "model",
    "context",
    "mode",
    "shares",
    "first token ms, predicted",
    "measured",
    "ratio",
    "step ms, predicted",
    "measured",
    "ratio",
)


def options() -> argparse.Namespace:
    """The command line."""
    flags = parser("Estimates against runs of vLLM on this machine.")
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument(
        "--threads", type=int, default=1, help="of an engine; with one, processor time is measured"
    )
    flags.add_argument("--models", nargs="+", default=list(FITTED | CHECKED), metavar="NAME")
    flags.add_argument("--fit", action="store_true", help="print the shares that fit best")
    flags.add_argument("--save", type=Path, metavar="FILE", help="keep what was measured")
    flags.add_argument("--load", type=Path, metavar="FILE", help="use that in place of runs")
    flags.add_argument(
        "--device", metavar="NAME", help="with --load: the device of the table that it was run on"
    )
    chosen = flags.parse_args()
    if chosen.device and not chosen.load:
        flags.error("--device needs --load: runs are made on this machine")
    return chosen


def cases(chosen: argparse.Namespace) -> list[Case]:
    """From a file, or measured now."""
    if chosen.load:
        return [Case(**item) for item in json.loads(chosen.load.read_text())]
    found: list[Case] = []
    for name in chosen.models:
        contexts = (*FITTED.get(name, ()), *CHECKED.get(name, ()))
        print(f"{name}: contexts {contexts}", file=sys.stderr, flush=True)
        found += cases_of(name, measured(name, contexts, chosen))
        if chosen.save:
            chosen.save.write_text(json.dumps([asdict(case) for case in found]))
    return found


def main() -> int:
    """Command line."""
    chosen = options()
    found = cases(chosen)
    report = report_of(found, device_named(chosen.device) if chosen.device else None)
    ratios = [value for value in report.values() if isinstance(value, float)]
    rates = {
        name: median([getattr(case, name) for case in found]) for name in ("bandwidth", "flops")
    }
    if chosen.fit:
        for name, value in fit([case for case in found if case.fitted]).items():
            print(f"{name} = {value:.3g}")
    figures: dict[str, object] = {"device": rates, "rows": [asdict(case) for case in found]}
    figures |= report
    figures["worst_ratio"] = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    print_report(HEADERS, rows_of(found, report), figures, as_json=chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
