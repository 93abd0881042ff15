"""Software prefetch for kernels."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        view = context.make_array(array_type)(context, builder, arguments[0])
        pointer = cgutils.get_item_pointer(  # type: ignore[no-untyped-call]
            context, builder, array_type, view, [arguments[1]], wraparound=False
        )
        i32 = ir.IntType(32)
        address = builder.bitcast(pointer, cgutils.voidptr_t)
        # (address, 0 = read, 3 = keep in all cache levels, 1 = data)
        function_type = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, function_type, "llvm.prefetch.p0"
        )
        builder.call(function, [address, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


prefetch = cast("Callable[[NDArray[Any], int | np.int64], None]", _prefetch)
"""Asks for the cache line of `array[index]` (one-dimensional); reads nothing and cannot fail.

A table larger than the caches costs one wait of about 100 ns a key; asked for a block of keys ahead, the
waits overlap.
"""
