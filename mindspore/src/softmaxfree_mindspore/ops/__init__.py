"""Tensors in, tensors out: the kernel, the inverse, the attention."""
