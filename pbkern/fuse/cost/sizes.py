"""Sizes: a target's limits and preferred sizes, by which the fuser chooses among few alternatives."""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one device family. They steer choices; no result depends on them.

    Attributes:
      line_bytes: memory comes in multiples of this.
      mask_strip: keys of attention that are left out together where a mask hides them.
      tile_rows, tile_columns: rows and columns of a contraction's block that are worth a try, in
        ascending order.
      longest_row_part: most columns of a block of a product of one row; 0: such products have blocks like others.
      matrix_types: types of operands that matrix instructions multiply.
      matrix_tiles, matrix_columns: rows and columns of the blocks of such products, in ascending order.
      held_words: words of sums and scores that the registers of a block hold while they are made a chunk of columns at a time;
        0: other limits decide.
      held_bytes: of the other operands of such a chunk.
      stage_bytes: a reduction of fewer bytes gains nothing from a second kernel.
      far_row_bytes: fewest bytes that one program reads of a row that no cache holds.
      short_row_bytes: rows up to this length are read one after the other by a program, where
        several make one result.
      split_result_bytes, split_operand_bytes: most of a contraction's result, fewest of its
        operands, for two stages.
      scatter_cycles: cycles of a scatter on one core below which a second kernel does not pay.
      updates_per_result: times more updates than results in a chunk of a scatter, at least: each chunk
        stores every result, which is read again.
      busy_programs: programs of each core that keep it busy, so that reductions need no second stage.
      fewest_chunks: chunks of one result, at least, that are worth a second stage.
      shortest_chunk: elements along a chunk; the second stage reads at most so small a part.
      turned_side: elements along each side of the square blocks from which those of kernels that
        read across rows are searched as well, and parts of planes tried; 0: they are not.
      leaves_out_hidden: whether attention leaves out keys that a mask hides which is known as the kernel runs, chunk by chunk.
      cuts_planes: whether a plane of few short lines is cut as well where each element is made of several.
      loop_elements: most elements of each value of a loop's body that runs inside one kernel; 0: loops stay outside.
      shared_loop_elements: the same for one of several programs that share a loop.
      independent_elements: elements that each program of such a loop computes independently of each other, where fewer programs
        could have all; short rows of each, such as a state of 4, count as one.
      square_side: elements along each side of the square blocks from which a kernel with halos is searched again.
      line_parts: elements of parts of a line that one program may take.
      even_part: parts of lines are multiples of this many elements, unless they are shorter.
      equal_parts: whether rows are cut into equal blocks. The last one of others is moved back to end at the array's edge, and
        stores again what the one before it stores.
    """

    line_bytes: int
    mask_strip: int
    tile_rows: tuple[int, ...]
    tile_columns: tuple[int, ...]
    longest_row_part: int
    matrix_types: frozenset[str]
    matrix_tiles: tuple[int, ...]
    matrix_columns: tuple[int, ...]
    held_words: int
    held_bytes: int
    stage_bytes: int
    far_row_bytes: int
    short_row_bytes: int
    split_result_bytes: int
    split_operand_bytes: int
    scatter_cycles: float
    updates_per_result: int
    busy_programs: int
    fewest_chunks: int
    shortest_chunk: int
    turned_side: int
    leaves_out_hidden: bool
    cuts_planes: bool
    loop_elements: int
    shared_loop_elements: int
    independent_elements: int
    square_side: int
    line_parts: tuple[int, ...]
    even_part: int
    equal_parts: bool
