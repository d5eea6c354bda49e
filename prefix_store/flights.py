"""Who is writing which blocks right now, so that nobody computes them twice.

Knows leases, the tokens they are about to write and where in the index they
stand. Does not know schedules or deadlines: who waits, and for how long, is
the caller's choice.

A lease that is about to compute a prompt asks to `join`. It *leads* when nobody
writes its next block yet; else it *follows* the one that does, for as many
tokens as their prompts share. As the leader's blocks are sealed, followers
catch up. When a leader ends or stops early, its first follower leads in its
place and the others follow that one. A follower may also take over from a
leader that gets nowhere.

    joined → leading | following;  following → leading;  both → left
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefix_store.blocks import TOKEN_BYTES, common_prefix
from prefix_store.leases import Lease
from prefix_store.node import Node

Place = tuple[Node, bytes]
"""Where a leader stands: the node its sealed blocks end at, and the block it writes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading:
    """This lease computes its tokens itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """Another lease is writing this one's tokens up to number `num_tokens`, a whole number of blocks."""

    leader: Lease
    num_tokens: int


Role = Leading | Following


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    leader: Lease
    data: bytes
    place: Place | None = None
    followers: dict[Lease, bytes] = field(default_factory=dict)


class FlightBoard:
    """Leaders by the place where they write, and who follows whom."""

    def __init__(self, *, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._by_place: dict[Place, _Flight] = {}
        self._led_by: dict[Lease, _Flight] = {}
        self._followed_by: dict[Lease, _Flight] = {}

    def writer_after(self, node: Node, rest: bytes) -> Lease | None:
        """Who writes the first block of `rest` after `node`, if anybody."""
        flight = self._by_place.get((node, rest[: self._block_bytes]))
        return None if flight is None else flight.leader

    def join(self, lease: Lease, data: bytes) -> Role:
        """Leads or follows; asked again, says which, and leads if what was waited for is there or gone."""
        if lease in self._led_by:
            return Leading()
        flight = self._followed_by.get(lease)
        if flight is not None:
            shared = self._shared(flight, data)
            if shared > lease.num_indexed:
                return Following(leader=flight.leader, num_tokens=shared * self._block_tokens)
            self._unfollow(lease)
        return self._lead_or_follow(lease, data)

    def _lead_or_follow(self, lease: Lease, data: bytes) -> Role:
        place = self._place_of(lease, data)
        flight = None if place is None else self._by_place.get(place)
        if flight is None:
            self._lead(_Flight(leader=lease, data=data), place)
            return Leading()
        flight.followers[lease] = data
        self._followed_by[lease] = flight
        return Following(leader=flight.leader, num_tokens=self._shared(flight, data) * self._block_tokens)

    def take_over(self, lease: Lease) -> None:
        """A follower that waited in vain leads. The others follow it; who led goes on beside it."""
        flight = self._followed_by[lease]
        data = flight.followers[lease]
        self._unfollow(lease)
        self._leave_place(flight)
        self._lead(_Flight(leader=lease, data=data), self._place_of(lease, data))
        self._disperse(flight)

    def moved(self, lease: Lease) -> None:
        """More of a lease's blocks were sealed: it writes elsewhere now."""
        flight = self._led_by.get(lease)
        if flight is not None:
            self._leave_place(flight)
            self._take_place(flight, self._place_of(lease, flight.data))

    def leave(self, lease: Lease) -> None:
        """A lease stops writing, or waiting: its first follower, if there is one, leads in its place."""
        self._unfollow(lease)
        flight = self._led_by.pop(lease, None)
        if flight is None:
            return
        self._leave_place(flight)
        self._disperse(flight)

    def _disperse(self, flight: _Flight) -> None:
        """Its followers find somebody else to follow, or lead."""
        followers, flight.followers = flight.followers, {}
        for follower in followers:
            del self._followed_by[follower]
        for follower, data in followers.items():
            self._lead_or_follow(follower, data)

    # ----

    @property
    def _block_tokens(self) -> int:
        return self._block_bytes // TOKEN_BYTES

    def _shared(self, flight: _Flight, data: bytes) -> int:
        """Leading blocks that a leader's prompt has in common with `data`."""
        return common_prefix(flight.data, data) // self._block_bytes

    def _place_of(self, lease: Lease, data: bytes) -> Place | None:
        """None when no full block is left to write."""
        start = lease.num_indexed * self._block_bytes
        block = data[start : start + self._block_bytes]
        return (lease.node, block) if len(block) == self._block_bytes else None

    def _lead(self, flight: _Flight, place: Place | None) -> None:
        self._led_by[flight.leader] = flight
        self._take_place(flight, place)

    def _take_place(self, flight: _Flight, place: Place | None) -> None:
        """A place that another leader holds stays its: both write, and the index keeps one."""
        if place is not None and place not in self._by_place:
            self._by_place[place] = flight
            flight.place = place

    def _leave_place(self, flight: _Flight) -> None:
        if flight.place is not None:
            del self._by_place[flight.place]
            flight.place = None

    def _unfollow(self, lease: Lease) -> None:
        flight = self._followed_by.pop(lease, None)
        if flight is not None:
            del flight.followers[lease]

    def check(self) -> None:
        """Asserts what must hold between calls."""
        for place, flight in self._by_place.items():
            assert flight.place == place
            assert self._led_by[flight.leader] is flight
            assert place == self._place_of(flight.leader, flight.data), "a leader has moved on unnoticed"
        for lease, flight in self._followed_by.items():
            assert lease in flight.followers
            assert lease not in self._led_by
            assert self._led_by[flight.leader] is flight, "a follower was left behind"
