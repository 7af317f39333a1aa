"""Calls taken apart into tensors and structure: shared tensors are one, and so are their gradients."""

from __future__ import annotations

import pytest
import torch

from upipe_integrations import (
    AttentionProjections,
    AttentionSpec,
    FunctionKernel,
    Mode,
    OutputProjection,
    Projection,
    Schedule,
    Staging,
    Weights,
    upipe_attention,
    upipe_attention_qkv,
)
from upipe_integrations.kernels import KERNELS
from upipe_integrations.projections.structure import Totals, take_apart

D = 4


def _projections(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Projection]:
    return [Projection(Weights(weight), D) for weight in (q, k, v)]


def test_a_tensor_in_several_places_is_one_and_structures_tell():
    a, b, c = (torch.randn(2 * D, 8) for _ in range(3))
    apart = [take_apart(Weights(weight, bias)) for weight, bias in ((a, None), (a, a), (a, b), (c, b))]
    assert [len(tensors) for _, tensors in apart] == [1, 1, 2, 2]
    structures = [structure for structure, _ in apart]
    assert structures[2] == structures[3] and hash(structures[2]) == hash(structures[3])
    assert len(set(structures)) == 3
    again = structures[1].with_tensors([c])
    assert again.weight is c and again.bias is c


def test_a_tensor_of_the_caller_for_gradients_is_no_input():
    weight, into = torch.randn(2 * D, 8), torch.zeros(2 * D, 8)
    structure, tensors = take_apart(Weights(weight, accumulate_into=into))
    assert len(tensors) == 1 and structure.with_tensors(tensors).accumulate_into is into


def test_totals_are_one_for_a_tensor_and_none_where_none_is_wanted():
    a, b = torch.randn(3), torch.randn(3, dtype=torch.bfloat16)
    totals = Totals([a, b], [False, True])
    assert totals.of(a) is None and not totals.wants(a) and totals.of(torch.randn(3)) is None
    total = totals.of(b, torch.float32)
    assert total.dtype == torch.float32 and totals.of(b) is total
    total += 1
    totals.add(b, torch.ones(3))
    totals.add(a, torch.ones(3))
    of_a, of_b = totals.take()
    assert of_a is None and of_b.dtype == torch.bfloat16 and of_b.tolist() == [2, 2, 2]


@pytest.mark.parametrize("memory", ["keep", "recompute", "blocks"])
def test_one_weight_for_all_has_the_sum_of_their_gradients(memory):
    """q, k and v by one weight, and the output projection by its transpose's copy: against autograd's own sums."""
    weight = torch.randn(2 * D, 2 * D, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 8, 2 * D, dtype=torch.float64, requires_grad=True)
    schedule = Schedule.build(heads=2, kv_heads=2, ranks=1, chunk_heads=1)
    staging = Staging(schedule, None, KERNELS["math"], mode=Mode.named(memory, query_blocks=2))
    copies = [weight.clone() for _ in range(4)]
    results = []
    for q, k, v, o in (copies, [weight] * 4):
        out = upipe_attention(x, AttentionProjections(*_projections(q, k, v)), staging, output=OutputProjection(o))
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, weight))])
    for shared, apart in zip(*results, strict=True):
        torch.testing.assert_close(shared, apart, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"keeps": "all"}, r"keeps = 'all': must be one of heads, output, nothing"),
        ({"keeps": "heads", "output_in_loop": True}, r"output_in_loop with keeps = 'heads': .*Set keeps to 'nothing'"),
        ({"keeps": "nothing", "query_blocks": 2}, r"query_blocks = 2: .*only with output_in_loop"),
        ({"query_blocks": 0}, r"query_blocks = 0: must be positive"),
    ],
)
def test_modes_that_are_none_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Mode(**parts)


def test_names_of_modes():
    from upipe_integrations.mode import MEMORY

    assert [Mode.named(name).memory for name in MEMORY] == list(MEMORY)
    with pytest.raises(ValueError, match=r"memory = 'keeps': no such memory mode. Known: keep_heads, keep"):
        Mode.named("keeps")


def test_a_kernel_without_block_forms_says_so():
    kernel, q = FunctionKernel(lambda q, k, v, spec: q, "mine"), torch.randn(1, 1, 2, 4)
    spec = AttentionSpec()
    assert kernel.block_refusal(spec) == "it can't attend blocks of rows"
    with pytest.raises(ValueError, match=r"kernel 'mine': it can't attend blocks of rows"):
        kernel.forward_block(q, q, q, spec, 0)
    with pytest.raises(ValueError, match=r"kernel 'mine': it can't attend blocks of rows"):
        kernel.backward_block((q, q, q, q, q, q), spec, 0, 0)


def test_heads_that_are_projected_already_have_no_rows_of_x_to_split():
    class Group:
        """Any group."""

    q = torch.randn(1, 8, 2, D)
    staging = Staging(
        Schedule.build(heads=2, kv_heads=2, ranks=1, chunk_heads=1), None, KERNELS["math"], x_group=Group()
    )
    with pytest.raises(ValueError, match=r"x_group with heads that are projected already"):
        upipe_attention_qkv(q, q, q, staging)
