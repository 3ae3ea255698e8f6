"""Explicit lifetimes: empty every register at its last use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from graphcomp.runtime.program.instructions import (
    AddGradient,
    Free,
    HandOver,
    Instruction,
    PassBuffers,
    Record,
    ReplaceGradient,
    Run,
    Send,
    Unshard,
    UpdateBuffer,
    WaitReceive,
)


def uses(instruction: Instruction) -> tuple[int, ...]:
    """The registers an instruction reads."""
    match instruction:
        case Run() | Send() | Unshard() | HandOver() | PassBuffers():
            return instruction.arguments
        case Record():
            return tuple(register for _, register in instruction.items)
        case UpdateBuffer() | ReplaceGradient() | AddGradient():
            return (instruction.register,)
        case _:
            return ()


def with_frees(
    instructions: Sequence[Instruction], lasting: Collection[int], bound: Iterable[int]
) -> Iterator[Instruction]:
    """Write every result that nobody reads as None, and empty every other register at its last use.

    lasting: registers of inputs that the whole step shares; they stay. bound: the registers of all inputs.
    """
    last: dict[int, int] = {}
    for place, instruction in enumerate(instructions):
        last |= dict.fromkeys(uses(instruction), place)
    for place, instruction in enumerate(instructions):
        ends = tuple(
            register
            for register in dict.fromkeys(uses(instruction))
            if last[register] == place and register not in lasting
        )
        if isinstance(instruction, Run | WaitReceive | Unshard | HandOver | PassBuffers):
            read = tuple(register if register in last else None for register in instruction.results)
            instruction = replace(instruction, results=read)
        if isinstance(instruction, Run):
            yield replace(instruction, frees=ends)
            continue
        yield instruction
        if ends:
            yield Free(ends)
