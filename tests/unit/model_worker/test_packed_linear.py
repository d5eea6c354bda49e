"""Packed linear layers compute what the plain ones compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from model_worker.packed_linear import PackedLinear, SiblingLinear, pack_linear_layers


class Attention(torch.nn.Module):
    """The part of an attention layer that has linear layers, as `transformers` names them."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q_proj = torch.nn.Linear(32, 48, bias=bias)
        self.k_proj = torch.nn.Linear(32, 16, bias=bias)
        self.v_proj = torch.nn.Linear(32, 16, bias=bias)
        self.o_proj = torch.nn.Linear(48, 32, bias=bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        query, key, value = self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)
        return self.o_proj(query + torch.cat([key, value, key], dim=-1))


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, count, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 33, 128])
def test_packed_layers_compute_the_same_products(num_rows: int, bias: bool) -> None:
    plain, packed = Attention(bias=bias), Attention(bias=bias)
    pack_linear_layers(packed)
    with torch.inference_mode():
        torch.testing.assert_close(packed(rows_of(num_rows)), plain(rows_of(num_rows)), rtol=1e-4, atol=1e-5)


def test_layers_with_the_same_input_are_joined_and_the_rest_are_packed_alone() -> None:
    network = Attention()
    pack_linear_layers(network)
    kinds = {name: type(child) for name, child in network.named_children()}
    assert kinds == dict.fromkeys(("q_proj", "k_proj", "v_proj"), SiblingLinear) | {"o_proj": PackedLinear}


def test_each_input_gets_its_own_products() -> None:
    plain, packed = Attention(), Attention()
    pack_linear_layers(packed)
    first, second = rows_of(4, seed=1), rows_of(4, seed=2)
    with torch.inference_mode():
        # One sibling asked for alone, twice, and between two inputs: nothing of the one before is left.
        for rows in (first, second, first):
            for _ in range(2):
                torch.testing.assert_close(packed.k_proj(rows), plain.k_proj(rows), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(packed(second), plain(second), rtol=1e-4, atol=1e-5)


def test_an_input_that_was_changed_in_place_is_computed_again() -> None:
    plain, packed = Attention(), Attention()
    pack_linear_layers(packed)
    with torch.inference_mode():
        rows = rows_of(4)
        packed(rows)
        rows.mul_(2.0)
        torch.testing.assert_close(packed(rows), plain(rows), rtol=1e-4, atol=1e-5)


def test_two_threads_in_one_network_get_each_their_own_products() -> None:
    plain, packed = Attention(), Attention()
    pack_linear_layers(packed)
    first, second = rows_of(4, seed=1), rows_of(9, seed=2)
    query, key = packed.q_proj, packed.k_proj
    with torch.inference_mode():
        query(first)
        with ThreadPoolExecutor(1) as other:
            # Another forward pass comes between two siblings of this one.
            theirs = other.submit(torch.inference_mode()(query), second).result()
            ours = key(first)
            theirs_too = other.submit(torch.inference_mode()(key), second).result()
        torch.testing.assert_close(ours, plain.k_proj(first), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs, plain.q_proj(second), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs_too, plain.k_proj(second), rtol=1e-4, atol=1e-5)


def test_packing_twice_does_nothing() -> None:
    network = Attention()
    pack_linear_layers(network)
    before = list(network.modules())
    pack_linear_layers(network)
    assert list(network.modules()) == before


def test_what_onednn_has_no_packing_for_stays_as_it_is() -> None:
    half = Attention().to(torch.bfloat16)
    pack_linear_layers(half)
    assert type(half.o_proj) is torch.nn.Linear

    class Scaled(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    network = torch.nn.Sequential(Scaled(32, 32))
    pack_linear_layers(network)
    assert type(network[0]) is Scaled


def test_siblings_of_which_some_have_a_bias_are_packed_alone() -> None:
    network = Attention()
    network.k_proj = torch.nn.Linear(32, 16, bias=True)
    pack_linear_layers(network)
    assert {type(child) for child in network.children()} == {PackedLinear}
