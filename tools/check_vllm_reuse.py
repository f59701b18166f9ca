"""Finds where vLLM itself forbids reuse of a prefix's KV, so that hotkv loads none that vLLM would
not, and compares with `ANSWERS`, how hotkv handles each.

A place is a statement that sets one of `FLAGS` to a value that may forbid reuse, with the
conditions around it, in any supported version (as in `check_vllm_api`). A new or changed place
has no answer: read it, handle it in `hotkv_vllm.compat.reuse`, list it here.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "connector_vllm")]

from tools.check_vllm_api import sources, supported  # noqa: E402
from tools.vllm_sources import Source  # noqa: E402

FLAGS: dict[str, tuple[bool | None, ...]] = {
    "enable_prefix_caching": (True, None),
    "enable_caching": (True, None),
    "skip_reading_prefix_cache": (False, None),
    "non_causal": (False, None),
}
"""Attributes, variables, parameters, keys; with the values that allow reuse."""


class Place(NamedTuple):
    """scope: classes and function around it.
    text: the statement, then the conditions around it in the function.
    """

    path: str
    scope: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.scope}: {self.text}"


_OF_MODEL = "reuse._of_model asks the same property"
_OF_SPECS = "reuse._of_specs reads the layers' specs"
_OF_LAYERS = "reuse._of_layers reads the same of all layers"
_OF_REQUEST = "Admission._refusal asks the request"
_OF_USER = "a benchmark's own default: what the user asks for"
_OF_STEP = "a variable of one step's attention, not of what is kept"
_IS_MERGE = "a group's spec keeps what its layers' say"
_BATCH_INVARIANT = (
    "cache_config.enable_prefix_caching = False "
    "if cache_config is not None and cache_config.enable_prefix_caching "
    "and envs.VLLM_BATCH_INVARIANT and (self.attn_backend.get_name() == '{}' "
    "or self.attn_backend.get_name() == '{}')"
)
_DEFAULTS = "EngineArgs._set_default_chunked_prefill_and_prefix_caching_args"

ANSWERS: dict[Place, str] = {
    # ---------------------------------------------------------------------------- the whole engine
    Place(
        "vllm/config/vllm.py",
        "VllmConfig.__post_init__",
        "self.cache_config.enable_prefix_caching = False "
        "if self.is_mm_encoder_only and self.cache_config.enable_prefix_caching",
    ): _OF_MODEL,
    Place(
        "vllm/engine/arg_utils.py",
        _DEFAULTS,
        "self.enable_prefix_caching = default_prefix_caching if self.enable_prefix_caching is None",
    ): "reuse._of_model asks is_prefix_caching_supported, as the default does",
    Place(
        "vllm/engine/arg_utils.py",
        _DEFAULTS,
        "self.enable_prefix_caching = False if current_platform.is_cpu() "
        "and current_platform.get_cpu_architecture() in (CpuArchEnum.RISCV,)",
    ): "reuse._of_platform asks the same",
    Place(
        "vllm/platforms/cpu.py",
        "CpuPlatform.check_and_update_config",
        "vllm_config.cache_config.enable_prefix_caching = False if model_config is not None "
        "and model_config.use_mla and (not amx_mla_or_dsv4_enabled)",
    ): "reuse._of_platform: chunked prefill is turned off in the same lines",
    Place(
        "vllm/v1/engine/core.py",
        "EngineCore._initialize_kv_caches",
        "vllm_config.cache_config.enable_prefix_caching = False "
        "if any((getattr(spec, 'non_causal', False) for worker_specs in kv_cache_specs "
        "for spec in worker_specs.values())) and vllm_config.cache_config.enable_prefix_caching",
    ): _OF_SPECS,
    Place(
        "vllm/model_executor/layers/attention/prefill_prefix_lm_attention.py",
        "PrefillPrefixLMAttention.get_kv_cache_spec",
        "non_causal=True if isinstance(spec, FullAttentionSpec)",
    ): _OF_SPECS,
    Place(
        "vllm/v1/kv_cache_interface.py",
        "FullAttentionSpec.merge",
        "non_causal=any((spec.non_causal for spec in specs))",
    ): _IS_MERGE,
    Place(
        "vllm/v1/kv_cache_interface.py",
        "SinkFullAttentionSpec.merge",
        "non_causal=any((spec.non_causal for spec in specs))",
    ): _IS_MERGE,
    Place(
        "vllm/v1/attention/backends/flash_attn.py",
        "_maybe_symmetrize_window",
        "non_causal = isinstance(causal, torch.Tensor) or causal is False",
    ): _OF_STEP,
    Place(
        "vllm/v1/attention/backends/mla/sparse_swa.py",
        "DeepseekSparseSWAMetadataBuilder.build",
        "non_causal = not common_attn_metadata.causal",
    ): _OF_STEP,
    Place(
        "vllm/model_executor/models/config.py",
        "UnlimitedOCRForCausalLMConfig.verify_and_update_config",
        "cache_config.enable_prefix_caching = False if cache_config.enable_prefix_caching",
    ): "reuse._of_specs: its layers have an RSWASpec",
    Place(
        "vllm/model_executor/layers/attention/attention.py",
        "Attention.__init__",
        _BATCH_INVARIANT.format("FLASHINFER", "TRITON_MLA"),
    ): _OF_LAYERS,
    Place(
        "vllm/model_executor/layers/attention/mla_attention.py",
        "MLAAttention.__init__",
        _BATCH_INVARIANT.format("TRITON_MLA", "FLASHINFER"),
    ): _OF_LAYERS,
    Place(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler.__init__",
        "enable_caching=self.cache_config.enable_prefix_caching",
    ): "hands the flag on",
    Place(
        "vllm/v1/core/single_type_kv_cache_manager.py",
        "HiSparseSourceManager.bind_host_pool",
        "enable_caching=self.enable_caching and self.kv_cache_spec.prefix_cacheable",
    ): "kv_groups.cache_groups leaves groups out that are not prefix_cacheable",
    # ------------------------------------------------------------------------------ single requests
    Place(
        "vllm/sampling_params.py",
        "SamplingParams.__post_init__",
        "self.skip_reading_prefix_cache = self.prompt_logprobs is not None "
        "or self.prompt_logprob_token_ids is not None if self.skip_reading_prefix_cache is None",
    ): _OF_REQUEST,
    Place(
        "vllm/pooling_params.py",
        "PoolingParams.verify",
        "self.skip_reading_prefix_cache = True "
        "if self.task == 'plugin' and self.skip_reading_prefix_cache is None",
    ): _OF_REQUEST,
    Place(
        "vllm/pooling_params.py",
        "PoolingParams.verify",
        "self.skip_reading_prefix_cache = True if self.late_chunking_params is not None",
    ): _OF_REQUEST,
    Place(
        "vllm/pooling_params.py",
        "PoolingParams._merge_default_parameters",
        "self.skip_reading_prefix_cache = True if self.skip_reading_prefix_cache is None "
        "and self.task in ['token_embed', 'token_classify']",
    ): _OF_REQUEST,
    Place(
        "vllm/v1/request.py",
        "Request.__init__",
        "self.skip_reading_prefix_cache = self.get_skip_reading_prefix_cache()",
    ): _OF_REQUEST,
    # ----------------------------------------------------------------------------- no engine's own
    Place("vllm/benchmarks/latency.py", "add_cli_args", "enable_prefix_caching=False"): _OF_USER,
    Place(
        "vllm/benchmarks/forward/main.py", "add_cli_args", "enable_prefix_caching=False"
    ): _OF_USER,
    Place(
        "vllm/benchmarks/forward/main.py",
        "_make_engine_args",
        "engine_args.enable_prefix_caching = False",
    ): _OF_USER,
}


def places(source: Source) -> Iterator[Place]:
    for path in source.paths():
        text = source.read(path) or ""
        if any(flag in text for flag in FLAGS):
            for scope, found in _found(ast.parse(text), (), ()):
                yield Place(path, ".".join(scope), found)


def _found(
    node: ast.AST, scope: tuple[str, ...], conditions: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """(scope, text) of each place in a tree. scope, conditions: around it."""
    for text in _stores(node):
        yield scope, f"{text} if {' and '.join(conditions)}" if conditions else text
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        scope, conditions = (*scope, node.name), ()
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        for branch, condition in ((node.body, test), (node.orelse, f"not ({test})")):
            for line in branch:
                yield from _found(line, scope, (*conditions, condition))
        return
    for child in ast.iter_child_nodes(node):
        yield from _found(child, scope, conditions)


def _stores(node: ast.AST) -> Iterator[str]:
    """Assignments in this node alone, also as arguments and dictionary items."""
    pairs: Sequence[tuple[str, ast.expr | None]] = ()
    if isinstance(node, ast.Assign):
        pairs = [(_stored(target), node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        pairs = [(_stored(node.target), node.value)]
    elif isinstance(node, ast.keyword):
        pairs = [(node.arg or "", node.value)]
    elif isinstance(node, ast.Dict):
        pairs = [(_text(key), value) for key, value in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
        pairs = [(_text(argument), node.args[-1]) for argument in node.args[:-1]]
    for name, value in pairs:
        if name in FLAGS and value is not None and not _permits(name, value):
            whole = not isinstance(node, ast.Dict | ast.Call)
            yield ast.unparse(node) if whole else f"{name}: {ast.unparse(value)}"


def _stored(target: ast.expr) -> str:
    """The name assigned to: an attribute, a key, or a variable."""
    if isinstance(target, ast.Subscript):
        return _text(target.slice)
    return getattr(target, "attr", getattr(target, "id", ""))


def _text(node: ast.expr | None) -> str:
    """Value of a string literal; empty for others."""
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _permits(name: str, value: ast.expr) -> bool:
    """A constant that allows reuse, or a variable of the same name, which is found where it is
    set."""
    if isinstance(value, ast.Constant):
        return value.value in FLAGS[name]
    return _stored(value) == name


def compare(source: Source, *, all_places: bool = False) -> list[str]:
    """Places without an answer. all_places: answers without a place too."""
    found = set(places(source))
    problems = [f"{place}: no answer in ANSWERS" for place in sorted(found - ANSWERS.keys())]
    if all_places:
        gone = sorted(ANSWERS.keys() - found)
        problems += [f"{place}: in ANSWERS, and vLLM has it no more" for place in gone]
    print(f"{source.name}: {len(found)} places that may forbid reuse, {len(problems)} problems")
    return problems


def main() -> int:
    found = [
        f"{source.name}: {problem}"
        for source, is_newest in sources(supported())
        for problem in compare(source, all_places=is_newest)
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
