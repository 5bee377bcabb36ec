"""The gradient of a kernel is its definition's: of what is asked for, once and twice, and of inputs of one origin."""

from __future__ import annotations

import torch
from torch import Tensor

from boundary.kernels.recording import recorded

from .interpreting import interpreted
from .test_add_norm import draw


def product(value: Tensor, factor: Tensor | None, offset: Tensor) -> tuple[Tensor, Tensor]:
    assert factor is not None
    return value * factor, value * value * factor + offset


def test_gradients_are_the_definitions_twice():
    inputs = [draw(3, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(3)]

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return recorded(lambda: tuple(one.clone() for one in product(*inputs)), product, *inputs)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_inputs_that_are_computed_from_each_other_count_once():
    def times(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    value = draw(3, dtype=torch.float64).requires_grad_()
    other = value.sin()
    made = recorded(lambda: value.detach() * other.detach(), times, value, other)
    wanted = value.sin() + value * value.cos()
    for again in (True, False):
        (first,) = torch.autograd.grad(made.sum(), value, create_graph=again, retain_graph=True)
        assert torch.allclose(first, wanted, rtol=1e-12)
    (first,) = torch.autograd.grad(made.sum(), value, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), value)
    assert torch.allclose(second, 2 * value.cos() - value * value.sin(), rtol=1e-12)


def test_only_what_needs_a_gradient_gets_one_and_none_stays_none():
    value, fixed = draw(3, dtype=torch.float64).requires_grad_(), draw(3, dtype=torch.float64, seed=1)

    def definition(value: Tensor, nothing: None, fixed: Tensor) -> Tensor:
        assert nothing is None and not fixed.requires_grad
        return value * fixed

    made = recorded(lambda: value.detach() * fixed, definition, value, None, fixed)
    made.sum().backward()
    assert value.grad is not None and torch.equal(value.grad, fixed)


def test_a_kernel_of_its_own_makes_the_gradient_where_that_is_final():
    value, calls = draw(3, dtype=torch.float64).requires_grad_(), []

    def back(value: Tensor, given: Tensor) -> tuple[Tensor]:
        calls.append(given)
        return (2 * given,)

    made = recorded(lambda: 2 * value.detach(), lambda value: 2 * value, value, back=back)
    wanted = torch.full_like(value, 2.0)
    with interpreted():
        (gradient,) = torch.autograd.grad(made.sum(), value, retain_graph=True)
        assert len(calls) == 1 and torch.equal(gradient, wanted)
        (gradient,) = torch.autograd.grad(made.sum(), value, create_graph=True)
        assert len(calls) == 1 and torch.equal(gradient, wanted)
    (gradient,) = torch.autograd.grad(made.sum(), value)
    assert len(calls) == 1 and torch.equal(gradient, wanted)


def test_nothing_is_recorded_where_autograd_does_not():
    def unused(*_: Tensor) -> Tensor:
        raise AssertionError("the definition is not run")

    value = draw(3, dtype=torch.float32)
    assert recorded(lambda: value, unused, value) is value
    with torch.no_grad():
        assert recorded(lambda: value, unused, value.clone().requires_grad_()) is value
