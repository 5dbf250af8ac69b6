"""Every kernel gives attention, its log-sum-exp and, by that of all blocks, its part of all gradients."""

import math

import pytest
import torch
from test_timed import FakeTime
from torch import Tensor

from workloads.context.attention_kernel import CpuFlash, CudaFlash, Dense, Kernel, Timed, kernel_for, num_pairs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KERNELS = {"flash": CpuFlash(), "dense": Dense()}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
# rows, keys, causal, query heads, heads of keys, head size
SIZES = [
    (8, 8, True, 4, 4, 16),
    (7, 7, True, 6, 2, 5),
    (1, 1, True, 3, 1, 8),
    (5, 9, False, 6, 3, 8),
    (9, 2, False, 3, 3, 4),
]
each_size = pytest.mark.parametrize(("rows", "keys", "causal", "heads", "kv_heads", "d"), SIZES)


def drawn(rows: int, keys: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return queries, keys and values that are slices of larger tensors, as blocks are."""
    torch.manual_seed(rows * keys)
    whole = [
        torch.randn(2, n, size + 3, d).to(dtype) for n, size in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    ]
    return [x[:, :, 2:-1] for x in whole]


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp in float64."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, dim=1), v.double().repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


@each_kernel
@each_size
def test_output_and_log_sum_exp(
    kernel: Kernel, rows: int, keys: int, causal: bool, heads: int, kv_heads: int, d: int
) -> None:
    q, k, v = drawn(rows, keys, heads, kv_heads, d)
    out, lse = kernel.forward(q, k, v, causal)
    expected, expected_lse = formula(q, k, v, causal)
    assert (out - expected).abs().max() < 2e-6
    assert (lse - expected_lse).abs().max() < 2e-6
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert lse.shape == q.shape[:3]


@each_kernel
@each_size
def test_gradients(kernel: Kernel, rows: int, keys: int, causal: bool, heads: int, kv_heads: int, d: int) -> None:
    given = drawn(rows, keys, heads, kv_heads, d)
    gradient = torch.randn_like(given[0])
    out, lse = kernel.forward(given[0], given[1], given[2], causal)
    found = kernel.backward(gradient, given[0], given[1], given[2], out, lse, causal)
    leaves = [x.double().requires_grad_() for x in given]
    expected = torch.autograd.grad(formula(leaves[0], leaves[1], leaves[2], causal)[0], leaves, gradient.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max()))


@each_kernel
def test_with_the_log_sum_exp_of_all_blocks_gradients_of_blocks_add_up(kernel: Kernel) -> None:
    q, k, v = drawn(6, 10, 4, 2, 8)
    gradient = torch.randn_like(q)
    out, lse = (x.float() for x in formula(q, k, v, causal=False))
    blocks = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 3), (3, 10))]
    parts = [kernel.backward(gradient, q, keys, values, out, lse, False) for keys, values in blocks]
    whole = kernel.backward(gradient, q, k, v, out, lse, False)
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat((parts[0][1], parts[1][1]), dim=2), whole[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat((parts[0][2], parts[1][2]), dim=2), whole[2], rtol=1e-5, atol=1e-5)


@each_kernel
def test_bfloat16_comes_back_in_bfloat16_and_its_log_sum_exp_in_float32(kernel: Kernel) -> None:
    q, k, v = drawn(8, 8, 4, 2, 16, torch.bfloat16)
    out, lse = kernel.forward(q, k, v, True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - formula(q, k, v, True)[0]).abs().max() < 0.02
    gradients = kernel.backward(torch.ones_like(q), q, k, v, out, lse, True)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


def test_pairs_are_counted_over_batch_and_query_heads() -> None:
    q, k, _ = drawn(5, 5, 6, 2, 4)
    assert num_pairs(q, k, True) == 2 * 6 * 15
    assert num_pairs(q, k[:, :, :3], False) == 2 * 6 * 15


def test_timed_attention_waits_by_the_pair_and_twice_as_long_backward() -> None:
    clock = FakeTime()
    kernel = Timed(clock.waiter(), seconds_per_pair=1e-3)
    q, k, v = drawn(4, 4, 2, 1, 4)
    out, lse = kernel.forward(q, k, v, True)
    assert clock.sleeps == pytest.approx([2 * 2 * 10 * 1e-3])
    kernel.backward(out, q, k, v, out, lse, False)
    assert clock.sleeps[1:] == pytest.approx([2 * 2 * 2 * 16 * 1e-3])


def test_timed_attention_has_the_shapes_of_a_real_one() -> None:
    q, k, v = drawn(4, 6, 4, 2, 8)
    kernel, real = Timed(FakeTime().waiter(), 1e-9), CpuFlash()
    out, lse = kernel.forward(q, k, v, False)
    assert [(x.shape, x.dtype) for x in (out, lse)] == [(x.shape, x.dtype) for x in real.forward(q, k, v, False)]
    gradients = kernel.backward(out, q, k, v, out, lse, False)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_size", "kind"),
    [
        (CPU, None, torch.float32, 5, CpuFlash),
        (CPU, None, torch.bfloat16, 64, CpuFlash),
        (CUDA, (8, 0), torch.bfloat16, 64, CudaFlash),
        (CUDA, (9, 0), torch.float16, 256, CudaFlash),
        (CUDA, (7, 5), torch.bfloat16, 64, Dense),
        (CUDA, (7, 0), torch.float16, 64, Dense),
        (CUDA, (9, 0), torch.float32, 64, Dense),
        (CUDA, (9, 0), torch.bfloat16, 20, Dense),
        (CUDA, (9, 0), torch.bfloat16, 512, Dense),
    ],
)
def test_the_fused_kernel_is_taken_where_there_is_one(
    device: torch.device, capability: tuple[int, int] | None, dtype: torch.dtype, head_size: int, kind: type
) -> None:
    def capability_of(asked: torch.device) -> tuple[int, int]:
        assert asked is device
        assert capability is not None, "CPUs have none"
        return capability

    assert type(kernel_for(device, dtype, head_size, capability_of)) is kind


@pytest.mark.gpu
def test_the_fused_kernel_of_gpus_agrees_with_the_formula() -> None:
    for rows, keys, causal, heads, kv_heads, _ in SIZES:
        q, k, v = (x.cuda() for x in drawn(rows, keys, heads, kv_heads, 64, torch.bfloat16))
        gradient = torch.randn_like(q)
        out, lse = CudaFlash().forward(q, k, v, causal)
        expected, expected_lse = Dense().forward(q, k, v, causal)
        assert (out - expected).abs().max() < 0.02
        assert (lse - expected_lse).abs().max() < 0.01
        found = CudaFlash().backward(gradient, q, k, v, expected, expected_lse, causal)
        for ours, theirs in zip(
            found, Dense().backward(gradient, q, k, v, expected, expected_lse, causal), strict=True
        ):
            assert (ours - theirs).abs().max() < 0.05
