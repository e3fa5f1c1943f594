"""What bounds the memory of a card's attention. No torch: the memory plan reads it without a GPU."""

# Parts into which the history of a short row is divided, at most.
PARTS = 128
# Pages of coded history that a prefill step has as plain values at a time, over all rows.
SEGMENT = 256
