"""Memory is used again when nobody sees it any more, and not before."""

import numpy as np
import pyarrow as pa

from ctr_ps.ps_server.table.memory.buffer_pool import BufferPool

SIZE = 8 * 100


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_piece_is_used_again_once_it_is_let_go_of() -> None:
    memory = BufferPool(SIZE)
    piece = memory.take()
    first = address(piece)
    del piece

    assert address(memory.take()) == first


def test_piece_is_not_used_again_while_there_is_a_view_of_it() -> None:
    """Whatever stands between: numpy's views, and Arrow's of them."""
    memory = BufferPool(SIZE)
    piece = memory.take()
    column = pa.array(piece[80:160].view(np.uint64).reshape(5, 2)[:, 0].reshape(-1)[:3])
    matrix = piece[160:].view(np.float32).reshape(-1, 4)[3:]
    record = pa.record_batch([pa.array(piece[:80].view(np.uint64))], names=["key"])
    del piece
    pieces = [memory.take() for _ in range(3)]
    for each in pieces:
        each[:] = 255

    assert (matrix == 0).all()
    assert record.column(0).to_pylist() == [0] * 10
    assert column.to_pylist() == [0] * 3


def test_last_view_gives_the_piece_back() -> None:
    memory = BufferPool(SIZE)
    record = pa.record_batch([pa.array(memory.take().view(np.uint64))], names=["key"])
    first = record.column(0).buffers()[1].address
    del record

    assert address(memory.take()) == first


def test_pieces_of_nothing() -> None:
    memory = BufferPool(0)

    assert [memory.take().size for _ in range(2)] == [0, 0]


def test_pieces_outlive_what_gave_them_out() -> None:
    memory = BufferPool(SIZE)
    piece = memory.take()
    del memory
    piece[:] = 7

    assert (piece == 7).all()
