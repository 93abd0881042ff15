"""Arenas: they grow, keep what is in them, and give back zeros."""

import errno
import gc
import mmap
from collections.abc import Callable
from itertools import repeat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.ps_server.table.memory.arena import (
    SMALL_REGION_BYTES,
    Arena,
    _tell_of_copying,
    region_bytes_of_table,
)
from tests.support.address_space import gives_huge_pages_on_request, map_some
from tests.support.garbage import without_collector
from tests.support.rows import resident_bytes

PAGE = mmap.PAGESIZE
BuildArena = Callable[..., Arena]


@pytest.fixture(params=["mapped", "copied"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BuildArena:
    """Builds arenas with reserved address space, and where there is none."""
    if request.param == "copied":
        monkeypatch.setattr(
            "ctr_ps.ps_server.table.memory.arena.mmap.mmap", map_some(repeat(False))
        )

    def build_arena(dtype: str = "f4", num_regions: int = 3, width: int = 3, **sizes: int) -> Arena:
        return Arena(dtype, num_regions=num_regions, width=width, **sizes)

    return build_arena


def regions(arena: Arena) -> np.ndarray:
    return arena.array.reshape(-1, arena.region_rows, arena.array.shape[1])


@pytest.mark.parametrize("region_bytes", [1, 12, 100, PAGE, 3 * PAGE + 1])
def test_regions_keep_their_rows_as_they_grow(build: BuildArena, region_bytes: int) -> None:
    """Even from regions that are smaller than a row."""
    arena = build(region_bytes=region_bytes)
    arena.reserve(5)
    for region in range(3):
        regions(arena)[region, :5] = region + 1

    for rows in (6, 50, 5000):
        arena.reserve(rows)

    assert arena.region_rows >= 5000
    for region in range(3):
        assert (regions(arena)[region, :5] == region + 1).all()
        assert not regions(arena)[region, 5:].any()


def test_regions_that_are_long_enough_stay_where_they_are(build: BuildArena) -> None:
    arena = build(region_bytes=PAGE)
    array = arena.array

    arena.reserve(arena.region_rows)

    assert arena.array is array


def test_growing_doubles_at_least(build: BuildArena) -> None:
    """Or inserting n rows would copy n * n of them."""
    arena = build(region_bytes=1200)

    arena.reserve(101)

    assert arena.region_rows == 200


def test_regions_that_cannot_be_reserved_start_small_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ctr_ps.ps_server.table.memory.arena.mmap.mmap", map_some(repeat(False)))
    _tell_of_copying.cache_clear()

    arenas = [Arena("f4", num_regions=64, width=4) for _ in range(2)]

    assert [arena.region_rows for arena in arenas] == [SMALL_REGION_BYTES // 16] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -v" in caplog.text


def test_more_than_the_address_space_is_not_reserved() -> None:
    arena = Arena("f4", num_regions=4, width=1, region_bytes=2**46)

    assert arena.array.nbytes == 4 * SMALL_REGION_BYTES


def test_as_many_tables_as_a_server_takes_reserve_their_regions() -> None:
    gc.collect()
    arenas = []
    for _ in range(256):
        size = region_bytes_of_table(64)
        arenas.append(Arena("f4", num_regions=64, width=4, region_bytes=size))
        arenas.append(Arena("u8", num_regions=128, width=1, region_bytes=size // 4))

    sizes = [each.region_rows * 16 for each in arenas[::2]]
    assert sizes[0] >= 2**32
    assert min(sizes) >= 2**29  # 32 GiB a table
    assert SMALL_REGION_BYTES // 8 not in {each.region_rows for each in arenas[1::2]}


class Garbage:
    """What only the garbage collector frees."""

    def __init__(self) -> None:
        self.arena = Arena("f4", num_regions=64, width=4)
        self.itself = self


def test_address_space_that_garbage_holds_is_taken() -> None:
    with without_collector():
        rows = {Garbage().arena.region_rows for _ in range(200)}  # 1 TiB each, of 128

    assert SMALL_REGION_BYTES // 16 not in rows


@pytest.mark.parametrize(("region_bytes", "is_worth_it"), [(PAGE, True), (2**47, False)])
def test_garbage_is_collected_only_where_that_may_make_room(
    region_bytes: int, is_worth_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a limit of addresses or of memory each arena would wait for the collector."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    collected = []
    monkeypatch.setattr("ctr_ps.ps_server.table.memory.arena.mmap.mmap", refuse)
    monkeypatch.setattr(
        "ctr_ps.ps_server.table.memory.arena.gc.collect", lambda: collected.append(1)
    )

    Arena("f4", num_regions=1, width=4, region_bytes=region_bytes)

    assert bool(collected) == is_worth_it


@settings(max_examples=60)
@given(data=st.data(), width=st.sampled_from([1, 3, 7]), is_mapped=st.booleans())
def test_released_rows_are_zero_and_their_neighbours_as_they_were(
    data: st.DataObject, width: int, is_mapped: bool
) -> None:
    """Rows of 12 or 28 bytes straddle pages, so pages may belong to both."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_mapped:
            patch.setattr("ctr_ps.ps_server.table.memory.arena.mmap.mmap", map_some(repeat(False)))
        arena = Arena("f4", num_regions=1, width=width, region_bytes=5 * PAGE)
    rows = arena.region_rows
    arena.array[:] = np.arange(1, rows + 1)[:, None]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))

    arena.release(start, stop)

    expected = np.arange(1, rows + 1)
    expected[start:stop] = 0
    assert (arena.array == expected[:, None]).all()


def test_released_pages_go_back_to_the_system() -> None:
    arena = Arena("f4", num_regions=1, width=4, region_bytes=64 * 2**20)
    before = resident_bytes()
    arena.array[:] = 1
    filled = resident_bytes()

    arena.release(0, arena.region_rows)

    assert filled - before > 60 * 2**20
    assert resident_bytes() - before < 4 * 2**20


HUGE_PAGE = 2 * 2**20
ROWS_A_HUGE_PAGE = HUGE_PAGE // 16


def resident_after_one_byte_a_huge_page(arena: Arena) -> int:
    """Returns by how many bytes this process grew when one row in each huge page of the arena was written."""
    before = resident_bytes()
    arena.array[:: ROWS_A_HUGE_PAGE // 2] = 1
    return resident_bytes() - before


@pytest.mark.parametrize("expected_pages", [0.0, 0.9, 8.0, 8.9])
def test_only_pages_that_expected_rows_fill_are_huge(expected_pages: float) -> None:
    """So that what is not used takes no memory."""
    if not gives_huge_pages_on_request():
        pytest.skip("this system gives huge pages to nobody or to everybody")
    arena = Arena(np.float32, num_regions=1, width=4, region_bytes=32 * HUGE_PAGE)

    arena.expect(0, int(expected_pages * ROWS_A_HUGE_PAGE))

    huge = resident_after_one_byte_a_huge_page(arena) // HUGE_PAGE
    assert min(1, int(expected_pages)) <= huge <= int(expected_pages)


def test_expected_rows_are_zero_and_can_be_released(build: BuildArena) -> None:
    arena = build(num_regions=1, width=4, region_bytes=4 * HUGE_PAGE)
    rows = 2 * ROWS_A_HUGE_PAGE
    arena.reserve(rows)
    arena.expect(0, rows)
    assert not arena.array[:rows].any()
    arena.array[:rows] = 1

    arena.release(10, rows)

    assert (arena.array[:10] == 1).all()
    assert not arena.array[10:rows].any()
