"""PyTorch's CUDA caching allocator, replayed: how much it reserves for a sequence of allocations.

Rules: sizes are rounded to 512 B. Up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of
20 MiB, larger from a segment of its own rounded to 2 MiB. The best fit by (size, address) is taken and split
when the rest is at least 512 B (small blocks, expandable segments) or more than 1 MiB (large blocks). Free
neighbours merge. When the device is full, cached segments nobody uses are released and the request is tried
again. With expandable segments each pool is one address range, mapped in steps of 2 or 20 MiB; holes can be
mapped again.

Source: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.13 (single stream; no
garbage collection threshold, no max_split_size, no power-of-two rounding: the defaults).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memtrain.memory.plan.units import MIB, round_up

SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_OWN_SEGMENT = 10 * MIB
ROUND_SEGMENT = 2 * MIB
ROUND_BLOCK = 512


class OutOfCapacity(Exception):
    """A request cannot be met even with every cached block released."""

    def __init__(self, num_bytes: int, reserved: int, allocated: int) -> None:
        super().__init__(f"{num_bytes} bytes with {reserved} reserved, {allocated} of them in use")
        self.num_bytes = num_bytes


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of addresses: in use, cached, or (expandable segments) not mapped."""

    size: int
    address: int
    pool: Pool
    prev: Block | None = None
    next: Block | None = None
    is_free: bool = True
    is_mapped: bool = True

    @property
    def key(self) -> tuple[int, int]:
        """Order of best fit."""
        return self.size, self.address


@dataclass(slots=True, eq=False)
class Pool:
    """Cached blocks of one kind of size."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list[tuple[int, int, "Block"]])
    """(size, address, block), sorted."""
    holes: list[tuple[int, Block]] = field(default_factory=list[tuple[int, "Block"]])
    """(address, block) of unmapped memory, sorted; expandable segments only."""
    start: int = 0

    @property
    def chunk(self) -> int:
        """Bytes that are mapped at once."""
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT

    def put(self, block: Block) -> None:
        """Cache a free block."""
        insort(self.free, (*block.key, block))

    def take(self, block: Block) -> None:
        """Remove a cached block."""
        self.free.pop(bisect_left(self.free, block.key, key=lambda entry: entry[:2]))

    def put_hole(self, block: Block) -> None:
        """Remember a stretch that is not mapped."""
        insort(self.holes, (block.address, block))

    def take_hole(self, block: Block) -> None:
        """Forget a stretch that is not mapped any more."""
        self.holes.pop(bisect_left(self.holes, block.address, key=lambda entry: entry[0]))


@dataclass(slots=True)
class CachingAllocator:
    """The allocator of a device. `capacity`: most bytes to reserve; None: without limit."""

    capacity: int | None = None
    expandable: bool = True
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    num_retries: int = 0
    """Times the device was full and cached memory was given back; each stops the device."""
    _pools: dict[bool, Pool] = field(default_factory=dict[bool, Pool])
    _live: dict[int, Block] = field(default_factory=dict[int, Block])
    _next_address: int = 1 << 40

    def allocate(self, name: int, num_bytes: int) -> None:
        """Meet a request; `name` is what `free` will call it.

        Raises: OutOfCapacity.
        """
        if num_bytes == 0:
            return
        size = round_up(num_bytes, ROUND_BLOCK)
        pool = self._pool(size)
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block is None:
            self.num_retries += 1
            self.release_cached()
            block = self._new_block(pool, size)
        if block is None:
            raise OutOfCapacity(num_bytes, self.reserved, self.allocated)
        self._split(block, size)
        block.is_free = False
        self._live[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, name: int) -> None:
        """Give back what `name` was given; nothing happens for a request of zero bytes."""
        block = self._live.pop(name, None)
        if block is None:
            return
        self.allocated -= block.size
        block.is_free = True
        block.pool.put(_merged(block))

    def release_cached(self) -> None:
        """Give back to the device whatever nobody uses: whole segments, or whole mapped chunks."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.take(block)
                    self.reserved -= block.size

    def _pool(self, size: int) -> Pool:
        is_small = size <= SMALL
        if is_small not in self._pools:
            pool = self._pools[is_small] = Pool(is_small)
            if self.expandable:
                whole = Block(1 << 50, self._next_address, pool, is_mapped=False)
                pool.start = whole.address
                pool.put_hole(whole)
                self._next_address += 1 << 51
        return self._pools[is_small]

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        index = bisect_left(pool.free, (size, 0), key=lambda entry: entry[:2])
        if index == len(pool.free):
            return None
        if self.expandable:
            # The room a block can still grow into counts, so that the open end is used last.
            while index + 1 < len(pool.free) and _room(pool.free[index + 1][2]) < _room(pool.free[index][2]):
                index += 1
        return pool.free.pop(index)[2]

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        is_split = rest >= ROUND_BLOCK if block.pool.is_small or self.expandable else rest > SMALL
        if is_split:
            block.pool.put(_cut(block, size))

    def _reserve(self, num_bytes: int) -> bool:
        if self.capacity is not None and self.reserved + num_bytes > self.capacity:
            return False
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        if self.expandable:
            return self._grown(pool, size)
        segment = segment_size(size)
        if not self._reserve(segment):
            return None
        block = Block(segment, self._next_address, pool)
        # Segments never touch, so they never merge.
        self._next_address += segment + ROUND_SEGMENT
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """The first stretch with room for `size`, mapped as far as needed."""
        start = next(
            (first for _, hole in pool.holes if (first := _first_with_room(hole, size)) is not None), None
        )
        if start is None:
            return None
        block = start if start.is_mapped else self._map(start, min(start.size, size))
        while block is not None and block.size < size:
            assert block.next is not None, "the room was counted before"
            block = self._map(block.next, min(size - block.size, block.next.size))
        if block is not None:
            pool.take(block)
        return block

    def _map(self, hole: Block, num_bytes: int) -> Block | None:
        """The first `num_bytes` of a hole, rounded up to chunks, mapped and merged with a free neighbour."""
        pool = hole.pool
        num_bytes = min(hole.size, round_up(num_bytes, pool.chunk))
        if not self._reserve(num_bytes):
            return None
        pool.take_hole(hole)
        if hole.size > num_bytes:
            pool.put_hole(_cut(hole, num_bytes))
        hole.is_mapped = True
        block = _merged(hole)
        pool.put(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give back the whole chunks inside a free block."""
        pool = block.pool
        low = pool.start + round_up(block.address - pool.start, pool.chunk)
        high = pool.start + (block.address + block.size - pool.start) // pool.chunk * pool.chunk
        if high <= low:
            return
        pool.take(block)
        middle = block
        if low > block.address:
            middle = _cut(block, low - block.address)
            pool.put(block)
        if high < middle.address + middle.size:
            pool.put(_cut(middle, high - middle.address))
        self.reserved -= middle.size
        middle.is_mapped = False
        for neighbour in (middle.prev, middle.next):
            if neighbour is not None and not neighbour.is_mapped:
                pool.take_hole(neighbour)
        pool.put_hole(_merged(middle, in_pool=False))


def segment_size(size: int) -> int:
    """Bytes that are asked of the device for a block of `size` that no cached block holds."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_OWN_SEGMENT else round_up(size, ROUND_SEGMENT)


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of the allocator for a sequence of events."""

    peak_allocated: int
    """Peak as `torch.cuda.max_memory_allocated` counts it: rounded sizes, with rests too small to split
    off."""
    peak_reserved: int
    num_retries: int
    fits: bool
    """Within the capacity; a device that had to release cached memory is slow but fits."""


def replay(
    events: Iterable[tuple[int, int]],
    *,
    capacity: int | None = None,
    expandable: bool = True,
    before: Iterable[int] = (),
) -> Replay:
    """Run (serial, bytes) events through an allocator; zero bytes end the allocation of that serial.

    `before`: sizes that are allocated first and stay. Where the capacity is not enough, `fits` is False and
    the peaks are those up to there.
    """
    allocator = CachingAllocator(capacity, expandable)
    fits = True
    try:
        for number, num_bytes in enumerate(before, start=1):
            allocator.allocate(-number, num_bytes)
        for serial, num_bytes in events:
            if num_bytes:
                allocator.allocate(serial, num_bytes)
            else:
                allocator.free(serial)
    except OutOfCapacity:
        fits = False
    return Replay(allocator.peak_allocated, allocator.peak_reserved, allocator.num_retries, fits)


def smallest_capacity(
    events: Sequence[tuple[int, int]],
    *,
    expandable: bool = True,
    without_retries: bool = False,
    step: int = 64 * MIB,
) -> int:
    """The smallest capacity, in steps of `step` bytes, that meets every request; found by bisection.

    `without_retries`: and never has to stop the device to release cached memory.
    """
    free = replay(events, expandable=expandable)
    low, high = free.peak_allocated // step, -(-free.peak_reserved // step)
    while low < high:
        middle = (low + high) // 2
        tried = replay(events, capacity=middle * step, expandable=expandable)
        if tried.fits and not (without_retries and tried.num_retries):
            high = middle
        else:
            low = middle + 1
    return high * step


def _room(block: Block) -> int:
    follows = block.next
    return block.size + (follows.size if follows is not None and not follows.is_mapped else 0)


def _first_with_room(hole: Block, size: int) -> Block | None:
    """Start of a free stretch around `hole` that holds `size`; None when there is less room."""
    before = hole.prev
    start = before if before is not None and before.is_free and before.is_mapped else hole
    room, block = 0, start
    while block is not None and block.is_free and room < size:
        room += block.size
        block = block.next
    return start if room >= size else None


def _cut(block: Block, size: int) -> Block:
    """Leave `block` its first `size` bytes; the rest as a block of the same kind, in no list."""
    rest = Block(
        block.size - size, block.address + size, block.pool, block, block.next, block.is_free, block.is_mapped
    )
    if rest.next is not None:
        rest.next.prev = rest
    block.next, block.size = rest, size
    return rest


def _merged(block: Block, *, in_pool: bool = True) -> Block:
    """`block` with its free neighbours of the same kind; cached ones leave their pool."""
    follows = block.next
    if follows is not None and follows.is_free and follows.is_mapped == block.is_mapped:
        if in_pool:
            block.pool.take(follows)
        _join(block, follows)
    before = block.prev
    if before is not None and before.is_free and before.is_mapped == block.is_mapped:
        if in_pool:
            block.pool.take(before)
        _join(before, block)
        return before
    return block


def _join(first: Block, second: Block) -> None:
    first.size += second.size
    first.next = second.next
    if first.next is not None:
        first.next.prev = first
