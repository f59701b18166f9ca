"""Checks of hotkv's use of vLLM: each change that a new version might bring is reported."""

from tests.vllm.changed_sources import Replaced
from tools import check_vllm_api, check_vllm_reuse, vllm_list
from tools.vllm_sources import installed

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
PARALLEL, CORE = "vllm/config/parallel.py", "vllm/v1/engine/core.py"
UTILS, SCHEDULER = "vllm/v1/core/kv_cache_utils.py", "vllm/v1/core/sched/scheduler.py"
# File, text, later text, report.
CHANGES = [
    (UTILS, "def resolve_dcp_kv", "def dcp_kv", "resolve_dcp_kv_block_size is not there"),
    (PARALLEL, " tensor_parallel_size: int", " tp: int", "no attribute tensor_parallel_size"),
    (BASE, " failed_recving: set", " failed: set", "no parameter failed_recving"),
    (BASE, "wait_for_save(self):", "wait_for_save(self, step: int):", "does not take step as"),
    (BASE, "@property\n    def requires_kv", "def requires_kv", "is a method in vLLM"),
    (BASE, "def take_events(", "def take(self): ...\n    def take_events(", "neither overridden"),
    (CORE, "self._reset_caches()", "self._drop_caches()", "is called by release_kv"),
]
REGISTRY = "vllm/v1/attention/backends/registry.py"
SPECS = "vllm/v1/kv_cache_interface.py"
ABSTRACT = "    @abstractmethod\n    def wait_for_save(self"
COUNT = "    @abstractmethod\n    def count(self): ...\n"
SLEEP, FORGET = "    def sleep(self", "    def forget(self):\n        self._reset_caches()\n"
KEY, VALUE = "    key: torch.Tensor,\n", "    value: torch.Tensor,\n"
CACHES = "    key_cache: torch.Tensor,\n    value_cache: torch.Tensor,\n"
CACHES += "    slot_mapping: torch.Tensor,\n    isa: str,"
# What the list of uses is compared with.
LATER = [
    (
        SPECS,
        "\nlogger = ",
        "\nclass PagedSpec(FullAttentionSpec): ...\n\nlogger = ",
        "PagedSpec is new",
    ),
    (
        REGISTRY,
        "    CPU_ATTN = ",
        '    NEW = "a"\n    CPU_ATTN = ',
        "AttentionBackendEnum.NEW is new",
    ),
    (REGISTRY, "    MAMBA1 = ", '    NEW = "a"\n    MAMBA1 = ', "MambaAttentionBackendEnum.NEW is"),
    (BASE, ABSTRACT, COUNT + ABSTRACT, "'abstract': ['build_connector_meta', 'count', "),
    (CORE, SLEEP, FORGET + SLEEP, "'callers': ['_finish_pause', 'forget', "),
    ("vllm/_custom_ops.py", KEY + VALUE + CACHES, VALUE + KEY + CACHES, "['value, key, key_cache"),
    (UTILS, "def resolve_dcp_kv", "def dcp_kv", "resolve_dcp_kv_block_size is None, and was {"),
    (BASE, "def wait_for_save(self)", "def wait_for_save(self, step)", "method(self, step)"),
]
# Places that forbid reuse.
SCHEDULED = "enable_caching=self.cache_config.enable_prefix_caching"
VERIFY = "        self.try_verify_and_update_config()\n"
OFF = "        if self.is_new:\n            self.cache_config.enable_prefix_caching = False\n"
POOLING = "vllm/pooling_params.py"
CUDA = "vllm/platforms/cuda.py"
SETS = """replace(config, enable_prefix_caching=is_even)
setattr(config, 'enable_prefix_caching', is_odd)
config['enable_prefix_caching'] = 0
OVERRIDES = {'enable_prefix_caching': False}
"""
FORBIDS = [
    ("vllm/config/vllm.py", VERIFY, OFF, "enable_prefix_caching = False if self.is_new: no answer"),
    (SCHEDULER, SCHEDULED, f"{SCHEDULED} and not self.is_odd", "(not self.is_odd): no answer"),
    (POOLING, '"token_classify"]', '"plug"]', "in ['token_embed', 'plug']: no answer"),
    (SPECS, "non_causal: bool = False\n", "non_causal: bool = True\n", "bool = True: no answer"),
    (CUDA, "\nlogger = ", f"\n{SETS}logger = ", "enable_prefix_caching=is_even: no answer"),
]


def test_what_a_later_version_changes_is_named() -> None:
    found = check_vllm_api.compare(Replaced(installed(), CHANGES), is_newest=False)
    for *_, what in CHANGES:
        assert any(what in problem for problem in found), f"{what}: {found}"
    assert len(found) < 60


def test_what_differs_from_the_list_is_named() -> None:
    found = vllm_list.differences(Replaced(installed(), LATER))
    for *_, what in LATER:
        assert any(what in line for line in found), f"{what}: {found}"
    assert len(found) < 20


def test_each_new_place_that_forbids_reuse_is_named() -> None:
    found = check_vllm_reuse.compare(Replaced(installed(), FORBIDS), all_places=True)
    for *_, what in FORBIDS:
        assert any(what in problem for problem in found), f"{what}: {found}"
    new = [problem for problem in found if "no answer" in problem]
    # The last row sets vLLM's flag in four ways.
    assert len(new) == len(FORBIDS) + 3
    gone = {problem.split(":")[0] for problem in found if problem not in new}
    assert gone >= {POOLING, SCHEDULER}
