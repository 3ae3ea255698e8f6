"""The model's live tensors: where they are read and written, sharded, copied, and first made."""
