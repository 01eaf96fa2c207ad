"""What a block lets go of and makes again: the same gradients, less memory, nothing stale, nothing left behind."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from vit_tp.sharding.saving import Saving, save_less_


class Block(nn.Module):
    """A norm, two readers of it, an activation, and a last layer."""

    def __init__(self, act: nn.Module, in_place: bool = False) -> None:
        super().__init__()
        self.norm, self.act, self.in_place = nn.LayerNorm(8), act, in_place
        self.left, self.right, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x)
        if self.in_place:
            u *= 2.0
        return x + self.last(self.act(self.left(u)) * self.right(u))


def build(act: nn.Module, in_place: bool = False) -> tuple[Block, Block]:
    torch.manual_seed(0)
    plain = Block(act, in_place).double()
    lean = copy.deepcopy(plain)
    save_less_(lean, Saving(), outputs=True)
    return plain, lean


def gradients(block: nn.Module, x: Tensor, times: int = 1) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = block(x).square().sum()
    for index in range(times):
        out.backward(retain_graph=index + 1 < times)
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("in_place", [False, True], ids=["", "changed in place"])
@pytest.mark.parametrize("act", [nn.GELU(), nn.ReLU(inplace=True), nn.Identity()], ids=lambda act: type(act).__name__)
def test_gradients_have_the_same_bits(act, in_place):
    plain, lean = build(act, in_place)
    x = torch.randn(4, 8, dtype=torch.float64)
    assert all(map(torch.equal, gradients(lean, x), gradients(plain, x)))


def test_backward_twice_over_one_graph():
    plain, lean = build(nn.GELU())
    x = torch.randn(4, 8, dtype=torch.float64)
    assert all(map(torch.equal, gradients(lean, x, times=3), gradients(plain, x, times=3)))


def test_two_passes_before_their_backwards():
    plain, lean = build(nn.GELU())
    found = []
    for block in (plain, lean):
        inputs = [torch.full((2, 8), float(k), dtype=torch.float64).requires_grad_() for k in (1, 2, 3)]
        outputs = [block(x).square().sum() for x in inputs]
        for out in reversed(outputs):
            out.backward()
        found.append([x.grad for x in inputs])
    assert all(map(torch.equal, *found))


def test_a_norm_is_made_once_for_all_that_read_it():
    _, lean = build(nn.GELU())
    calls = []
    forward = lean.norm.forward
    lean.norm.forward = lambda x: calls.append(1) or forward(x)
    gradients(lean, torch.randn(4, 8, dtype=torch.float64))
    assert len(calls) == 2


def test_a_copy_saves_for_itself():
    plain, lean = build(nn.GELU())
    x = torch.randn(4, 8, dtype=torch.float64)
    assert all(map(torch.equal, gradients(copy.deepcopy(lean), x), gradients(plain, x)))


def test_an_error_in_a_block_leaves_no_hooks():
    _, lean = build(nn.GELU())
    with pytest.raises(RuntimeError):
        lean(torch.randn(4, 9, dtype=torch.float64))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    gradients(lean, torch.randn(4, 8, dtype=torch.float64))


def test_nothing_is_left_after_backward():
    _, lean = build(nn.GELU())
    kept = []
    lean.act.register_forward_hook(lambda module, args, out: kept.append(weakref.ref(args[0])))
    gradients(lean, torch.randn(4, 8, dtype=torch.float64))
    gc.disable()  # by counting references alone, or a step's memory would wait for the collector
    try:
        gradients(lean, torch.randn(4, 8, dtype=torch.float64))
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def test_hooks_outside_see_what_is_kept():
    """A checkpoint or an offload around the block gets the sources in place of what is made from them."""
    _, lean = build(nn.GELU())
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
        out = lean(torch.randn(4, 8, dtype=torch.float64).requires_grad_())
    out.sum().backward()
    assert sizes.count((4, 16)) >= 2, "what the activation is made from, and the product"
    offloaded = torch.randn(4, 8, dtype=torch.float64)
    with torch.autograd.graph.save_on_cpu():
        again = gradients(lean, offloaded)
    lean.zero_grad()
    assert all(map(torch.equal, again[:1], gradients(lean, offloaded)[:1]))


@pytest.mark.parametrize("is_fast", [False, True])
def test_what_is_made_again_under_autocast_is_what_was_there(is_fast):
    """timm's fast norms run in the half type under autocast; backward runs without."""
    from timm.layers import LayerNorm, set_fast_norm

    set_fast_norm(is_fast)
    try:
        torch.manual_seed(0)
        plain = Block(nn.GELU())
        plain.norm = LayerNorm(8)
        lean = copy.deepcopy(plain)
        save_less_(lean, Saving(), outputs=True)
        found = []
        for block in (plain, lean):
            x = torch.arange(32.0).view(4, 8).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = block(x).square().sum()
            out.backward()
            found.append([x.grad, *(p.grad for p in block.parameters())])
        assert all(map(torch.equal, *found))
    finally:
        set_fast_norm(False)


@pytest.mark.parametrize("act", [nn.GELU(), nn.ReLU(), nn.Tanh()], ids=lambda act: type(act).__name__)
def test_no_activation_costs_more(act):
    sizes = []
    for block in build(act):
        kept: dict[int, int] = {}

        def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = block(torch.randn(64, 8, dtype=torch.float64).requires_grad_())
        sizes.append(sum(kept.values()))
        del out
    plain, lean = sizes
    assert lean < plain, "the norm's output at least"
