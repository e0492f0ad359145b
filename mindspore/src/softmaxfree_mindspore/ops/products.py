"""Products of stacks of matrices, (..., n, k) and (..., k, m), leading axes equal.

By primitives made once: in PyNative mode `ops.matmul` takes 20 times as long for small ones.
"""

from mindspore import ops

product = ops.BatchMatMul()
"""x y"""

product_t = ops.BatchMatMul(transpose_b=True)
"""x y^T"""

t_product = ops.BatchMatMul(transpose_a=True)
"""x^T y"""
