"""The order of many children: the nearest ones are found without looking at all."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from prefix_store.blocks import TokenKind, block_ids
from prefix_store.node import FEW_CHILDREN, KeyOrder, Node

KEYS = st.sets(st.binary(min_size=1, max_size=3), min_size=1, max_size=60)


@given(keys=KEYS, probe=st.binary(max_size=3))
def test_the_two_neighbours_of_a_key_are_near(keys: set[bytes], probe: bytes) -> None:
    order = KeyOrder(keys)
    ordered = sorted(keys)
    at = bisect_left(ordered, probe)
    assert order.near(probe) == ordered[max(at - 1, 0) : at + 1]


def test_ten_thousand_keys_stay_in_order_as_they_come_and_go() -> None:
    keys = [number.to_bytes(4, "little") for number in range(10_000)]
    order = KeyOrder(keys[:1])
    for key in keys[1:]:
        order.add(key)
    assert order.in_order() == sorted(keys)
    for key in keys[::3]:
        order.remove(key)
    left = sorted(set(keys) - set(keys[::3]))
    assert order.in_order() == left
    for probe in keys[::7]:
        at = bisect_left(left, probe)
        assert order.near(probe) == left[max(at - 1, 0) : at + 1]


def test_the_last_key_can_go() -> None:
    order = KeyOrder([b"a"])
    order.remove(b"a")
    assert order.in_order() == []
    assert order.near(b"a") == []


def make_node() -> Node:
    nothing = block_ids(())
    return Node(
        parent=None, scope="aa", tokens=b"", names=b"", blocks=nothing, depth=0, kind=TokenKind.USER, now=0.0
    )


def test_nodes_without_children_share_nothing_that_changes() -> None:
    one, other = make_node(), make_node()
    one.add_child(b"a", other)
    assert not other.children
    one.remove_child(b"a")
    assert not one.is_followed


def test_a_node_keeps_an_order_of_its_children_once_they_are_many() -> None:
    node = make_node()
    for number in range(FEW_CHILDREN + 1):
        node.add_child(bytes([number]), make_node())
    assert node.order is not None
    assert node.order.in_order() == sorted(node.children)
