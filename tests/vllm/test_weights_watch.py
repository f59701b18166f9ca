"""`WeightsWatch` notices writes and digests weights."""

import itertools
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from hotkv_vllm.identity import weights_watch
from hotkv_vllm.identity.weights_watch import (
    ROW_WORDS,
    WHOLE_BYTES,
    WRITERS,
    WeightsWatch,
    watch_callers,
)

NUMBERS = itertools.count()


class Model(torch.nn.Module):
    def __init__(self, seed: int = 0, large: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(2))
        # No weights: they differ in all models.
        changing = torch.tensor([next(NUMBERS)])
        self.register_buffer("scratch", changing, persistent=False)
        self.encoder = torch.nn.Module()
        vars(self.encoder)["_fp8_dynamic_scale"] = True
        self.encoder.register_buffer("_fp8_q_scale", changing)
        # Not contiguous.
        self.turned = torch.nn.Parameter(torch.arange(32.0).view(4, 8).t())
        self.view = torch.nn.Parameter(torch.arange(100.0)[10:50:3])
        if large:
            self.large = torch.nn.Parameter(torch.randn(large).to(torch.bfloat16))

    def load_weights(self, weights: Any) -> set[str]:
        named = dict(self.named_parameters())
        for name, tensor in weights:
            named[name].data.copy_(tensor)
        return set(named)


def test_equal_weights_have_equal_digests_tensors_count() -> None:
    one, two = WeightsWatch([Model()]), WeightsWatch([Model()])
    assert one.original == two.original == one.digest() != WeightsWatch([Model(1)]).original
    for name in ("first.weight", "first.bias", "scale", "turned", "view"):
        model = Model()
        watch = WeightsWatch([model])
        tensor = (dict(model.named_parameters()) | dict(model.named_buffers()))[name].data
        last = tuple(size - 1 for size in tensor.shape)
        before = tensor[last].clone()
        tensor[last] += 1
        assert watch.digest() != watch.original and not watch.touched
        tensor[last] = before
        assert watch.digest() == watch.original, name


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(WHOLE_BYTES // 2 - 3, WHOLE_BYTES))
def test_one_element_in_fifty_shows_when_large(seed: int, num_elements: int) -> None:
    model = Model(large=num_elements)
    watch = WeightsWatch([model])
    generator = torch.Generator().manual_seed(seed)
    model.large.data[torch.rand(num_elements, generator=generator) < 0.02] += 1
    assert watch.digest() != watch.original


@pytest.mark.parametrize("skipped", [0, 1, 2, 4])
def test_one_written_element_of_large_tensor_shows(skipped: int) -> None:
    """skipped: offset of the tensor in its memory, bytes."""
    model = torch.nn.Module()
    raw = torch.zeros(3_000_007 + skipped, dtype=torch.uint8)[skipped:]
    model.register_buffer("large", raw)
    watch = WeightsWatch([model])
    # At both ends, between the words that a quick check samples, and pairs that cancel over all
    # words or a column.
    places = [(0,), (1_000_100,), (1_777_701,), (1_777_706,), (len(raw) - 5_001,), (-1,)]
    cancelling = [(1_000_100, 1_700_000), (1_000_100, 1_000_100 + 8 * ROW_WORDS)]
    for changed in places + cancelling:
        before = raw[list(changed)].clone()
        raw[list(changed)] += torch.tensor([1, 255][: len(changed)], dtype=torch.uint8)
        watch.touched = True
        assert watch.digest() != watch.original, changed
        raw[list(changed)] = before
        watch.touched = True
        assert watch.digest() == watch.original


def test_unreadable_weights_are_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = WeightsWatch([torch.nn.Linear(2, 2)])
    watch.touched = True
    with monkeypatch.context() as patch:
        patch.setattr(weights_watch, "_samples", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            watch.digest()
    assert watch.touched and watch.digest() == watch.original and not watch.touched


def test_writing_through_the_model_is_noticed_and_works() -> None:
    model = Model()
    watch = WeightsWatch([model])
    assert not watch.touched
    assert "first.bias" in model.load_weights([("first.bias", torch.zeros(4))])
    assert watch.touched and not model.first.bias.any()
    assert watch.digest() != watch.original and not watch.touched


@pytest.mark.parametrize("name", WRITERS)
def test_failed_writes_through_worker_are_noticed_too(name: str) -> None:
    worker = SimpleNamespace(**{name: lambda: 1 // 0})
    watch = WeightsWatch([Model()], [worker])
    with pytest.raises(ZeroDivisionError):
        getattr(worker, name)()
    assert watch.touched


def test_weights_zeroed_for_checking_are_noticed() -> None:
    from vllm.v1.worker.gpu_worker import Worker as WorkerOfVllm

    model = Model()

    class Zeroing:
        model_runner = SimpleNamespace(get_model=lambda: model)
        reset_weights = WorkerOfVllm.reset_weights

    worker = Zeroing()
    watch = WeightsWatch([model], [worker])
    worker.reset_weights()
    assert watch.touched and not model.first.weight.any() and watch.digest() != watch.original


class Runner:
    def __init__(self) -> None:
        self.vllm_config, self.model = None, Model()
        self.drafter = SimpleNamespace(model=Model(7))

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self) -> None:
        self.model.first.weight.data += 1

    def initialize(self) -> Any:
        return watch_callers()


class Worker:
    def __init__(self) -> None:
        self.model_runner = Runner()

    def update_weights(self) -> None:
        self.model_runner.model.first.weight.data += 1

    def initialize(self) -> Any:
        return self.model_runner.initialize()


def test_registering_worker_is_found_with_its_models() -> None:
    worker = Worker()
    watch = worker.initialize()
    assert watch.original == WeightsWatch([Model(), Model(7)]).original
    for write in (worker.update_weights, worker.model_runner.reload_weights):
        write()
        assert watch.touched and watch.digest() != watch.original
    assert watch_callers() is None


class Packed(torch.nn.Module):
    """A kernel holds the packed weight, as in vLLM's CPU engines."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.Parameter(torch.ones(4)), torch.nn.Module()
        self.load_weights(seed)

    def load_weights(self, seed: int) -> None:
        torch.manual_seed(seed)
        weight = torch.randn(64, 32).to(torch.bfloat16)
        self.linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.pack()

    def pack(self) -> None:
        dispatch_cpu_unquantized_gemm(self.linear, remove_weight=True)


class Quantized(Packed):
    """Packed by `ZentorchWNA16LinearKernel`, under other names."""

    def pack(self) -> None:
        self.linear.weight_packed, packed = self.linear.weight, self.linear.weight.clone()
        del self.linear.weight
        self.linear._zentorch_woq_packed = packed.data
        self.linear.weight_packed.data = torch.empty(0)


class Wrapped(Packed):
    """MXFP4 experts as on GPUs."""

    def pack(self) -> None:
        self.linear.w13_weight = SimpleNamespace(storage=self.linear.weight.data)
        del self.linear.weight


@pytest.mark.parametrize("kind", [Packed, Quantized, Wrapped])
def test_unreadable_new_weights_have_their_own_digest(kind: type[Packed]) -> None:
    one, two = kind(0), kind(0)
    watches = [WeightsWatch([model]) for model in (one, two)]
    assert [watch.digest() for watch in watches] == [watch.original for watch in watches]
    one.load_weights(1)
    two.load_weights(2)
    found = [watch.digest() for watch in watches]
    assert len({*found, watches[0].original}) == 3
    assert [watch.digest() for watch in watches] == found, "as long as nothing is written"


@pytest.mark.parametrize("kind", [Packed, Quantized])
def test_wake_up_changes_only_unseen_packed_weights(
    kind: type[Packed],
) -> None:
    """`Quantized` weights may have been packed again unnoticed."""
    model, worker = kind(0), SimpleNamespace(wake_up=lambda: None)
    watch = WeightsWatch([model], [worker])
    worker.wake_up()
    assert watch.touched and (watch.digest() == watch.original) == (kind is Packed)
    worker.wake_up()
    model.norm.data += 1
    assert watch.digest() != watch.original
    assert watch.original != WeightsWatch([kind(2)]).original, "others' may be hidden, too"


class Quantized8(torch.Tensor):
    """Like torchao's: its elements are in two other tensors."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> "Quantized8":
        return Quantized8(**parts)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *more: Any) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(more[1][0].codes, more[1][0].scale)


def test_wrapper_weights_have_their_parts_digest() -> None:
    def watched(code: int, scale: float) -> WeightsWatch:
        model = torch.nn.Module()
        codes = torch.full((1024, 2048), code, dtype=torch.int8)
        weight = Quantized8(codes, torch.full((1024,), scale))
        model.weight = torch.nn.Parameter(weight, requires_grad=False)
        return WeightsWatch([model])

    same, *others = (watched(*one).original for one in ((1, 1.0), (1, 1.0), (2, 1.0), (1, 2.0)))
    assert same == others[0] and len({same, *others}) == 3
