"""When the sizes of tables are looked at, and what is over the limit."""

from ctr_ps.ps_server.table.memory.memory_limit import MemoryLimit


class Tables:
    """Tables whose sizes are looked at."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.num_looks = 0

    def look(self) -> dict[str, int]:
        self.num_looks += 1
        return self.sizes


def test_sizes_are_looked_at_only_when_the_limit_may_be_reached() -> None:
    tables = Tables(deep=500)
    limit = MemoryLimit(1000, tables.look)

    assert [limit.is_exceeded(100) for _ in range(5)] == [False] * 5
    assert tables.num_looks == 1
    tables.sizes["deep"] = 550  # most keys had rows already
    assert [limit.is_exceeded(100) for _ in range(4)] == [False] * 4
    assert tables.num_looks == 2


def test_tables_at_the_limit_are_within_it_and_a_byte_more_is_not() -> None:
    tables = Tables(deep=600, wide=400)
    limit = MemoryLimit(1000, tables.look)

    assert not limit.is_exceeded(50)
    tables.sizes["wide"] += 1
    assert limit.is_exceeded(50)
    assert limit.is_exceeded(0)
    tables.sizes["deep"] = 100
    assert not limit.is_exceeded(50)


def test_description_has_the_limit_and_the_largest_table_first() -> None:
    limit = MemoryLimit(1000, Tables(wide=400, deep=601).look)

    assert limit.describe() == (
        "tables have 1001 bytes ('deep' 601, 'wide' 400), more than the memory limit of 1000"
    )
