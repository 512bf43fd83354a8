"""Params: the operation of an equation, read from its parameters, which JAX may rename."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy

from . import operations
from .program import Equation


def _of_python(value: Any) -> Any:
    """Integers and tuples of integers as Python objects; JAX may use NumPy's."""
    if type(value) is tuple:
        return tuple(map(_of_python, value))
    return value.item() if isinstance(value, numpy.integer) else value


def operation(equation: Equation) -> operations.Operation | None:
    """The operation of an equation, if `chains` rewrites it and supports this form of it: static
    shapes, random bits in 32-bit words.
    """
    params = {name: _of_python(value) for name, value in equation.params.items()}
    num_operands = len(equation.inputs)
    match equation.primitive:
        case "broadcast_in_dim" if num_operands == 1:
            return operations.Broadcast(params["shape"], params["broadcast_dimensions"])
        case "reshape" if num_operands == 1 and params["dimensions"] is None:
            return operations.Reshape(params["new_sizes"])
        case "slice":
            starts, strides = params["start_indices"], params["strides"]
            # JAX may omit strides of 1.
            strides = (1,) * len(starts) if strides is None else strides
            return operations.Slice(starts, params["limit_indices"], strides)
        case "pad":
            return operations.Pad(tuple(params["padding_config"]))
        case "transpose":
            return operations.Transpose(params["permutation"])
        case "reduce_and" | "reduce_or" as name if equation.outputs[0].dtype == bool:
            return operations.Logical(tuple(params["axes"]), name == "reduce_and")
        case "dynamic_slice" if num_operands == 1 + len(params["slice_sizes"]):
            return operations.DynamicSlice(params["slice_sizes"])
        case "gather" if _is_lookup(equation):
            return operations.Lookup()
        case "random_split":
            return operations.SplitKeys(tuple(params["shape"]))
        case "random_bits" if params["bit_width"] == 32:
            return operations.DrawWords(tuple(params["shape"]))
        case "random_fold_in":
            return operations.FoldIn()
        case _:
            return None


def _is_lookup(equation: Equation) -> bool:
    """True for the three forms of a gather that `jax.vmap` makes of `table[index]`: over the
    index, over the table, or over both, the mapped axis leading.
    """
    params, (table, positions) = equation.params, equation.inputs
    numbers, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    last = len(table.shape) - 1
    if (
        params["mode"] != jax.lax.GatherScatterMode.CLIP
        or tuple(numbers.collapsed_slice_dims)
        or tuple(numbers.start_index_map) != (last,)
    ):
        return False
    leading = tuple(table.shape[:-1])
    batching = tuple(numbers.operand_batching_dims), tuple(numbers.start_indices_batching_dims)
    of_index = len(leading) == 0 and batching == ((), ()) and sizes == (1,)
    of_table = len(leading) == 1 and batching == ((), ()) and sizes == (*leading, 1)
    of_both = len(leading) == 1 and batching == ((0,), (0,)) and sizes == (1, 1)
    rank, offsets = len(positions.shape), tuple(numbers.offset_dims)
    if of_table:
        return rank == 1 and offsets == (0, 1)
    return (of_index or of_both) and rank == 2 and offsets == (1,)


def parameters_of(equation: Equation) -> str:
    """The parameters of an operation as text. Equations of one primitive with equal texts are the
    same function of their operands.
    """
    return str(sorted((name, str(value)) for name, value in equation.params.items()))


def exponent(equation: Equation) -> int:
    """The exponent of an `integer_pow`."""
    return equation.params["y"]


def joined_axis(equation: Equation) -> int:
    """The axis of a `concatenate` or a `stack`."""
    return equation.params["dimension" if equation.primitive == "concatenate" else "axis"]


def reduced_axes(equation: Equation) -> tuple[int, ...]:
    """The axes that a `reduce_sum` sums over."""
    return tuple(equation.params["axes"])


def running_axis(equation: Equation) -> tuple[int, bool]:
    """The axis along which a `cumprod` runs, and True if it runs backward."""
    return equation.params["axis"], equation.params["reverse"]


def contracted(equation: Equation) -> tuple[Any, Any]:
    """The axes of both operands that a `dot_general` sums over, and their batches."""
    summed, batches = equation.params["dimension_numbers"]
    return tuple(map(tuple, summed)), tuple(map(tuple, batches))


def counted_axis(equation: Equation) -> int:
    """The axis along which an `iota` counts."""
    return equation.params["dimension"]


def moved_entry(equation: Equation, index: Sequence[Any]) -> tuple[Any, ...] | None:
    """The position of an entry of the result in the operand, for an operation that only moves
    entries; `None` for others. A position on an axis is a number, or `(label, stride, offset)` for
    `offset + stride · label`.
    """
    match operation(equation):
        case operations.Broadcast(_, axes):
            return tuple(index[axis] for axis in axes)
        case operations.Transpose(axes):
            return tuple(index[axes.index(axis)] for axis in range(len(axes)))
        case operations.Slice(starts, _, strides):
            return tuple(map(_further, index, strides, starts))
        case _:
            return None


def _further(place: Any, stride: int, start: int) -> Any:
    if isinstance(place, int):
        return start + stride * place
    # start + stride · (offset + old_stride · label)
    label, old_stride, offset = place
    return label, old_stride * stride, offset * stride + start


def sums_over_first(equation: Equation) -> bool:
    """True for a sum over the first axis, alone or with others."""
    return equation.primitive == "reduce_sum" and 0 in equation.params["axes"]


def into_floats(equation: Equation) -> dict[str, Any]:
    """The parameters to change so that an operation on integers applies to floats."""
    kinds = {"new_dtype", "preferred_element_type"} & set(equation.params)
    if any(equation.params[name] is None for name in kinds):
        return {}
    return dict.fromkeys(kinds, jax.numpy.result_type(float))
