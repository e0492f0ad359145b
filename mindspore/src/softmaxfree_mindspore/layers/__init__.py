"""Cells: the attention layer, its samplers, the blocks and the patch embeddings."""
