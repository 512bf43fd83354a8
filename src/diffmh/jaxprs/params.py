"""Params: what an equation does, read from its primitive's parameters, which JAX may rename."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy

from . import operations
from .program import Equation


def _of_python(value: Any) -> Any:
    """Integers, and tuples of them, which JAX may give as NumPy's, as Python's."""
    if type(value) is tuple:
        return tuple(map(_of_python, value))
    return value.item() if isinstance(value, numpy.integer) else value


def operation(equation: Equation) -> operations.Operation | None:
    """The operation of an equation, if `chains` rewrites it and knows this form of it: shapes that
    are not operands, random words of 32 bits.
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
            # JAX leaves strides of 1 out, or spells them out.
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
        case "dynamic_update_slice":
            return operations.DynamicUpdate()
        case "random_split":
            return operations.SplitKeys(tuple(params["shape"]))
        case "random_bits" if params["bit_width"] == 32:
            return operations.DrawWords(tuple(params["shape"]))
        case "random_fold_in":
            return operations.FoldIn()
        case _:
            return None


def parameters_of(equation: Equation) -> str:
    """The parameters of an operation as text: equations of one primitive with equal texts are the
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
    """The axis along which a `cumprod` runs, and whether it runs backward."""
    return equation.params["axis"], equation.params["reverse"]


def contracted(equation: Equation) -> tuple[Any, Any]:
    """The axes of both operands that a `dot_general` sums over, and their batches."""
    summed, batches = equation.params["dimension_numbers"]
    return tuple(map(tuple, summed)), tuple(map(tuple, batches))


def counted_axis(equation: Equation) -> int:
    """The axis along which an `iota` counts."""
    return equation.params["dimension"]


def moved_entry(equation: Equation, index: Sequence[Any]) -> tuple[Any, ...] | None:
    """Where an entry of the result stands in the operand of an operation that only moves entries;
    `None` for other operations. A place on an axis is a number, or `(label, stride, offset)` for
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
    """True for a sum over the first axis, and perhaps over others."""
    return equation.primitive == "reduce_sum" and 0 in equation.params["axes"]


def into_floats(equation: Equation) -> dict[str, Any]:
    """The changed parameters with which an operation on integers makes floats of floats."""
    kinds = {"new_dtype", "preferred_element_type"} & set(equation.params)
    if any(equation.params[name] is None for name in kinds):
        return {}
    return dict.fromkeys(kinds, jax.numpy.result_type(float))


def only_says_that_it_varies(equation: Equation) -> bool:
    """True if an equation is one that `compat.vary` makes."""
    return equation.primitive == "pvary"
