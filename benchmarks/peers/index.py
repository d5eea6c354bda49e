# ruff: noqa: PLC0415 - a side is imported only where it runs
"""One side of the index benchmark: ours, SGLang's or vLLM's, behind the same few commands.

Runs in a process of its own, in the environment of its peer: nothing but the
standard library is imported before the side is known. Reads one command a
line from standard input and answers each with one line of JSON.

    fill      blocks of one-off prompts until so many are resident
    begin     a base prompt, whose prefix the next prompts share
    step      one prompt: look up, name and insert what is new; answers seconds and hit tokens

Peers run from their own published wheels. Only their logic is loaded: modules
that would pull in kernels, models or servers are replaced by empty ones.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import sys
import time
import types
from array import array
from pathlib import Path

BLOCK = 16
VOCABULARY = range(150_000)
FILL_BLOCKS = 100


def tokens_of(seed: int, count: int) -> list[int]:
    """The same for every side."""
    return random.Random(seed).choices(VOCABULARY, k=count)


class Side:
    """What every side does alike."""

    def begin(self, base: list[int] | array) -> None:
        """The prompt whose prefix the next ones share."""
        self.step(base)


class Ours(Side):
    """The whole life of a lease: names, match, insert, pool, reference counts, statistics."""

    def __init__(self, options: argparse.Namespace) -> None:
        from prefix_store.blocks import BlockNamer
        from prefix_store.store import PrefixStore

        namer = BlockNamer(seed=1, model_fingerprint="bench", dtype="f32", kv_codec="raw", block_size=BLOCK)
        self.store = PrefixStore(num_blocks=options.blocks, block_size=BLOCK, namer=namer)
        self.base: tuple[object, array] | None = None
        self.version = "this commit"

    def prepare(self, tokens: list[int]) -> array:
        return array("I", tokens)

    def begin(self, base: array) -> None:
        """Held until the next one: the default policy may choose a prompt that is new to make room."""
        store, count = self.store, len(base)
        if self.base is not None:
            lease, tokens = self.base
            store.release(lease, tokens, len(tokens))
        lease = store.acquire("aa", base, max_cached_tokens=count - 1)
        store.extend(lease, count)
        store.seal(lease, base, count)
        self.base = lease, base

    def make_room(self, num_blocks: int) -> None:
        store = self.store
        lease = store.acquire("ff", array("I"), max_cached_tokens=0)
        store.extend(lease, num_blocks * BLOCK)
        store.discard(lease)

    def step(self, tokens: array) -> int:
        store, count = self.store, len(tokens)
        lease = store.acquire("aa", tokens, max_cached_tokens=count - 1)
        store.extend(lease, count)
        store.release(lease, tokens, count)
        return lease.cached_tokens


class OursIndex(Side):
    """The index and the pool: names, match, insert, blocks, reference counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        from prefix_store.blocks import BlockNamer, TokenKind, token_bytes, token_view
        from prefix_store.books import Books
        from prefix_store.eviction import EvictionOrder
        from prefix_store.index import RadixIndex
        from prefix_store.misses import Cause, GhostNames
        from prefix_store.policy.lru import LruPolicy
        from prefix_store.pool import BlockPool

        namer = BlockNamer(seed=1, model_fingerprint="bench", dtype="f32", kv_codec="raw", block_size=BLOCK)
        self.pool = BlockPool(options.blocks)
        self.order = EvictionOrder(policy=LruPolicy(), quotas=None, num_blocks=options.blocks)
        books = Books(ghosts=GhostNames(capacity=2 * options.blocks), events=None)
        self.index = RadixIndex(namer=namer, pool=self.pool, order=self.order, books=books)
        self.token_view, self.token_bytes = token_view, token_bytes
        self.kind, self.cause = TokenKind.USER, Cause.PRESSURE
        self.version = "this commit"

    def prepare(self, tokens: list[int]) -> array:
        return array("I", tokens)

    def make_room(self, num_blocks: int) -> None:
        now = time.monotonic()
        while (missing := num_blocks - self.pool.num_free) > 0:
            self.index.evict(self.order.victim("aa", now), missing, self.cause, now)

    def step(self, tokens: array) -> int:
        index, num_blocks = self.index, len(tokens) // BLOCK
        now = time.monotonic()
        match = index.match("aa", self.token_view(tokens), 4 * len(tokens) - 4, 0)
        node = index.open_scope("aa", now) if match is None else index.hold(match, now)
        num_hit = 0 if match is None else match.num_bytes // (4 * BLOCK)
        blocks = self.pool.take(num_blocks - num_hit)
        new = self.token_bytes(tokens, num_hit * BLOCK)
        last, kept = index.grow(node, new, blocks, self.kind, now)
        assert kept is blocks
        index.let_go(last, now)
        return num_hit * BLOCK


class Sglang(Side):
    """`RadixCache`: match and insert. It makes no names, and its pool of slots is left out."""

    def __init__(self, options: argparse.Namespace) -> None:
        load_logic_only(Path(options.packages), SGLANG_LOGIC, tops=("sglang",))
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        torch.set_num_threads(1)

        class Slots:
            device = "cpu"

            def free_segment(self, indices: object, start_pos: int) -> None:
                pass

        self.key, self.match, self.insert, self.evict = RadixKey, MatchPrefixParams, InsertParams, EvictParams
        self.cache = RadixCache.create_simulated(page_size=options.page_size, mock_allocator=Slots())
        self.capacity_tokens = options.blocks * BLOCK
        self.slots = torch.arange(1 << 20, dtype=torch.int64)
        self.version = options.version

    def prepare(self, tokens: list[int]) -> array:
        return array("q", tokens)

    def make_room(self, num_blocks: int) -> None:
        excess = self.cache.evictable_size() + num_blocks * BLOCK - self.capacity_tokens
        if excess > 0:
            self.cache.evict(self.evict(num_tokens=excess))

    def step(self, tokens: array) -> int:
        key = self.key(tokens)
        found = self.cache.match_prefix(self.match(key=key))
        self.cache.insert(self.insert(key=key, value=self.slots[: len(tokens)]))
        return found.device_prefix_len


class Vllm(Side):
    """Its block hashes and `BlockPool`, called as its cache manager calls them, without the manager."""

    def __init__(self, options: argparse.Namespace) -> None:
        load_logic_only(Path(options.packages), VLLM_LOGIC, tops=("vllm",))
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        hash_function = get_hash_fn_by_name(options.hash)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)
        # One block of the pool is the null block.
        self.pool = BlockPool(num_gpu_blocks=options.blocks + 1, enable_caching=True, hash_block_size=BLOCK)
        self.version = options.version

    def prepare(self, tokens: list[int]) -> VllmRequest:
        return VllmRequest(tokens)

    def make_room(self, num_blocks: int) -> None:
        pool = self.pool
        pool.free_blocks(pool.get_new_blocks(num_blocks))

    def step(self, request: VllmRequest) -> int:
        pool = self.pool
        request.block_hashes = self.hasher(request)
        hits = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            found = pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hits += found
        pool.touch(hits)
        num_full = len(request.block_hashes)
        blocks = hits + pool.get_new_blocks(num_full - len(hits))
        pool.cache_full_blocks(request, blocks, len(hits), num_full, BLOCK, 0)
        pool.free_blocks(reversed(blocks))
        return len(hits) * BLOCK


class VllmRequest:
    """What the hasher and the pool read of a request."""

    def __init__(self, tokens: list[int]) -> None:
        self.all_token_ids = tokens
        self.num_tokens = len(tokens)
        self.block_hashes: list[bytes] = []
        self.mm_features: list[object] = []
        self.lora_request = None
        self.cache_salt = None
        self.prompt_embeds = None
        self.request_id = "bench"


SIDES = {"ours": Ours, "index": OursIndex, "sglang": Sglang, "vllm": Vllm}

SGLANG_LOGIC = frozenset(
    f"sglang.srt.mem_cache.{name}"
    for name in ("radix_cache", "base_prefix_cache", "cache_init_params", "events", "utils", "evict_policy")
)
VLLM_LOGIC = frozenset(
    (
        "vllm.v1.core.block_pool",
        "vllm.v1.core.kv_cache_utils",
        "vllm.v1.core.kv_cache_metrics",
        "vllm.utils.hashing",
        "vllm.utils.math_utils",
    )
)


class _Anything:
    """Stands for whatever an empty module is asked for."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __call__(self, *args: object, **options: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else _Anything()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __class_getitem__(cls, item: object) -> type:
        return cls


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Anything,), {})
        setattr(self, name, made)
        return made


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives an empty module for every name under `tops` that is not logic."""

    def __init__(self, root: Path, logic: frozenset[str], tops: tuple[str, ...]) -> None:
        self.root, self.logic, self.tops = root, logic, tops

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name.partition(".")[0] not in self.tops:
            return None
        if name in self.logic:
            file = self.root.joinpath(*name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load_logic_only(root: Path, logic: frozenset[str], *, tops: tuple[str, ...]) -> None:
    sys.meta_path.insert(0, _EmptyModules(root, logic, tops))
    if tops == ("sglang",):
        from sglang.srt.utils import common

        # Not logic worth loading 5,000 lines for.
        common.ceil_align = lambda value, unit: -(-value // unit) * unit


def serve(options: argparse.Namespace) -> None:
    side = SIDES[options.side](options)
    base: list[int] = []
    answer: dict[str, object] = {"version": side.version}
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = {}
        if command["do"] == "fill":
            for number in range(command["blocks"] // FILL_BLOCKS):
                side.step(side.prepare(tokens_of(1_000_000 + number, FILL_BLOCKS * BLOCK)))
            gc.collect()
            gc.freeze()
        elif command["do"] == "begin":
            base = tokens_of(command["seed"], command["tokens"])
            side.make_room(len(base) // BLOCK)
            side.begin(side.prepare(base))
        else:
            answer = step(side, base, command)
        print(json.dumps(answer), flush=True)


def step(side: Ours | Sglang | Vllm, base: list[int], command: dict[str, int]) -> dict[str, object]:
    """Room is made, and the prompt put into the side's own form, before the clock starts."""
    shared = command["shared_tokens"]
    prompt = side.prepare(base[:shared] + tokens_of(command["seed"], len(base) - shared))
    side.make_room(len(base) // BLOCK)
    started = time.perf_counter()
    hit_tokens = side.step(prompt)
    return {"seconds": time.perf_counter() - started, "hit_tokens": hit_tokens}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=sorted(SIDES))
    parser.add_argument("--packages", default="")
    parser.add_argument("--version", default="")
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--hash", default="xxhash")
    serve(parser.parse_args())
