"""StableHLO that lowerings write without jax: see `write` of `torchtpu.ops.registry.lowering`."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]
Kind = tuple[Shape, str]  # and the element type, as StableHLO calls it


def type_of(shape: Shape, element: str) -> str:
    """The type of an array."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def padded(given: Kind, made: Shape, edges: Sequence[tuple[int, int, int]]) -> list[str]:
    """What puts zeros before, behind and between the elements of the only array."""
    shape, element = given
    name, zero = "%c", "false" if element == "i1" else "0"
    if element.startswith(("f", "bf", "complex")):
        name, zero = "%cst", "0.000000e+00"
    if element.startswith("complex"):
        zero = f"({zero},{zero})"
    low, high, interior = (list(each) for each in zip(*edges, strict=True))
    scalar = type_of((), element)
    types = f"({type_of(shape, element)}, {scalar}) -> {type_of(made, element)}"
    return [
        f"{name} = stablehlo.constant dense<{zero}> : {scalar}",
        f"%0 = stablehlo.pad %arg0, {name}, low = {low}, high = {high}, interior = {interior} : {types}",
    ]
