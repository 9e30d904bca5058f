"""The model types and the lengths of sequences that MaxText 0.2.5 and its converters take."""

from __future__ import annotations

import math

# The types that containers/train_maxtext/family.py converts to MaxText and back.
FAMILIES = ("llama", "qwen3")
# The length of a sequence is a multiple. On a TPU, splash attention works in blocks of 512 tokens, or of the whole
# sequence if that is shorter (MaxText 0.2.5, attention_op.py: sa_block_q and its like).
TPU_BLOCK, TPU_LANES, CPU_LANES = 512, 128, 16
BATCH_SIZE = 1  # sequences of a chip in a step, where the spec has no number: that of tutorial 002
SEALED_ROWS = 16  # PyTorch answers so many at once after the training, on the host's CPU, for the seal


def padded_length(length: int, tpu: bool) -> int:
    """The length of sequences for rows of at most `length` tokens."""
    lanes = CPU_LANES if not tpu else TPU_LANES if length <= TPU_BLOCK else TPU_BLOCK
    return math.ceil(length / lanes) * lanes
